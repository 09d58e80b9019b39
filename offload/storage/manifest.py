"""The manifest at the end of each file of a persistent home: identity, state (clean or not) and checksums.

::

    contents, whole pages | description, whole pages | manifest, one page

The contents are first, so that mappings and direct I/O are aligned. The description is text, one line per tensor, so
that an error can name the first tensor that differs. The manifest is one page, which a disk writes atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from offload.storage.buffer import PAGE_BYTES, host_buffer, view_memory, whole_pages
from offload.storage.stored_file import StoredFile
from offload.storage.transfer import Transfers, move_all

__all__ = [
    "HomeError",
    "Manifest",
    "checksum",
    "describe",
    "digest",
    "file_bytes",
    "is_of_a_home",
    "read_description",
    "read_manifest",
    "write_manifest",
]

MAGIC = b"gradhome"
#: 1 had one file for each shard, so its offsets depended on the cuts.
VERSION = 2
#: Magic, version, place, places, clean, contents bytes, description bytes, generation, home; then four digests of 32
#: bytes: description, contents, and that of all this.
_FIELDS = struct.Struct("<8s4I3Q16s32s32s")
_DIGEST_BYTES = 32
#: Far more than any home is opened, and few enough that the next number fits.
_MOST_GENERATIONS = 1 << 63
#: The checksum of the contents combines those of pieces of this size, which is part of the format.
_CHECKED_BYTES = 8 << 20


#: Advice for a damaged file.
RESTORE = "Restore all files of the directory, or create the home again with DiskHome(..., overwrite=True)"


class HomeError(ValueError):
    """A persistent home cannot be used: it is another model's, outdated, damaged, or in use. It was not changed."""


@dataclass(frozen=True)
class Manifest:
    """The fields of the manifest, in the order of the format."""

    #: Index of this file among the ``places`` files of its home.
    place: int
    places: int
    #: Whether the home was closed after its contents were last written.
    clean: bool
    contents_bytes: int
    description_bytes: int
    #: How often the home was opened; equal in all files of a home.
    generation: int
    #: Random identity of the home.
    home: bytes
    description_digest: bytes
    contents_digest: bytes

    def pack(self) -> bytes:
        """The manifest as one page."""
        fields = _FIELDS.pack(MAGIC, VERSION, *astuple(self))
        return (fields + digest(fields)).ljust(PAGE_BYTES, b"\0")


def digest(data: bytes) -> bytes:
    """Cryptographic hash of a few bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def describe(lines: Sequence[str]) -> bytes:
    """The description of a file: a line on byte order, then one per tensor."""
    return "\n".join([f"bytes are {sys.byteorder}-endian", *lines]).encode()


def file_bytes(contents_bytes: int, description_bytes: int) -> int:
    """Size of a file."""
    return whole_pages(contents_bytes) + whole_pages(description_bytes) + PAGE_BYTES


def read_manifest(path: Path, what: str) -> Manifest:
    """Reads a manifest. Raises HomeError for another format or version, damage, or a file not of the recorded size."""
    with _regular(path, what) as file:
        size = os.fstat(file).st_size
        page = os.pread(file, PAGE_BYTES, max(0, size - PAGE_BYTES))
    if len(page) != PAGE_BYTES or not page.startswith(MAGIC):
        raise HomeError(
            f"{path} ({what}): expected a file that ends with a manifest of this format, got {size:,} bytes without "
            f"one: a file of another program, or a truncated one. Use another directory, or restore the file"
        )
    version = int.from_bytes(page[len(MAGIC) : len(MAGIC) + 4], "little")
    if version != VERSION:
        raise HomeError(
            f"{path} ({what}): expected format version {VERSION}, got {version}. Open it with the release that wrote "
            f"it and save a checkpoint there; load that into a new home, DiskHome(..., overwrite=True)"
        )
    fields = page[: _FIELDS.size]
    if page != (fields + digest(fields)).ljust(PAGE_BYTES, b"\0"):
        raise HomeError(f"{path} ({what}): the manifest does not match its checksum, it is damaged. {RESTORE}")
    _, _, place, places, clean, *rest = _FIELDS.unpack(fields)
    manifest = Manifest(place, places, bool(clean), *rest)
    if clean > 1 or not 0 < manifest.generation < _MOST_GENERATIONS:
        raise HomeError(
            f"{path} ({what}): expected 0 or 1 as clean and a generation from 1 on, got clean={clean}, "
            f"generation={manifest.generation}; the manifest is damaged. {RESTORE}"
        )
    expected = file_bytes(manifest.contents_bytes, manifest.description_bytes)
    if size != expected:
        raise HomeError(f"{path} ({what}): expected {expected:,} bytes, got {size:,}; it is incomplete. {RESTORE}")
    return manifest


def read_description(path: Path, manifest: Manifest) -> bytes:
    """Reads the description of a file."""
    with _regular(path, "description") as file:
        return os.pread(file, manifest.description_bytes, whole_pages(manifest.contents_bytes))


@contextlib.contextmanager
def _regular(path: Path, what: str) -> Iterator[int]:
    """Opens a file of a home to read. Raises HomeError for a link, which leads out of it, or a special file."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise HomeError(
            f"{path} ({what}): expected a regular file, got a link, a directory or a special file. {RESTORE}"
        )
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def is_of_a_home(path: Path) -> bool:
    """Whether a file ends with a manifest of any version, which only homes have."""
    try:
        with _regular(path, "") as file:
            at = os.fstat(file).st_size - PAGE_BYTES
            return at >= 0 and os.pread(file, len(MAGIC), at) == MAGIC
    except (OSError, HomeError):
        return False


def write_manifest(file: StoredFile | Path, manifest: Manifest, description: bytes | None = None) -> None:
    """Writes the manifest of a file (and the description of a new one); returns once it is on the disk."""
    file = StoredFile(file) if isinstance(file, Path) else file
    path, fd = file.path, file.open()
    try:
        if description is not None:
            move_all(os.pwritev, fd, memoryview(description), whole_pages(manifest.contents_bytes), path)
        at = file_bytes(manifest.contents_bytes, manifest.description_bytes) - PAGE_BYTES
        # Contents -> manifest. Without this, a power cut leaves a clean manifest of contents that were never written.
        os.fsync(fd)
        move_all(os.pwritev, fd, memoryview(manifest.pack()), at, path)
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Path, contents_bytes: int, transfers: Transfers) -> bytes:
    """Checksum of a file's contents, computed by a few threads, in memory for one piece each."""
    count = 4
    buffer = host_buffer(min(count * _CHECKED_BYTES, contents_bytes))
    sums: list[int] = []
    for begin in range(0, contents_bytes, count * _CHECKED_BYTES):
        part = buffer[: min(buffer.numel(), contents_bytes - begin)]
        transfers.read(path, part, begin)
        sums.extend(transfers.map_parallel(zlib.crc32, [view_memory(piece) for piece in part.split(_CHECKED_BYTES)]))
    return digest(b"".join(value.to_bytes(4, "little") for value in sums))
