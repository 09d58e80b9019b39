"""The manifest at the end of the file of a persistent home: identity and state (closed or not).

::

    contents, whole pages | description, whole pages | manifest, one page

The contents are first, so that mappings and direct I/O are aligned. The description is text, one line per tensor, so
that an error can name the first tensor that differs. The manifest is one page, which a disk writes atomically.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import astuple, dataclass
from pathlib import Path

from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.storage.stored_file import StoredFile
from offload.storage.transfer import move_all

__all__ = ["HomeError", "Manifest", "digest", "file_bytes", "is_of_a_home", "read_manifest", "write_manifest"]

MAGIC = b"gradhome"
#: 1 had one file for each shard, 2 one for weights and one for buffers.
VERSION = 3
#: Magic, version, clean, contents bytes, description bytes, generation, home, digest of the description; then that of
#: all this.
_FIELDS = struct.Struct("<8s2I3Q16s32s")
_DIGEST_BYTES = 32
#: Far more than any home is opened, and few enough that the next number fits.
_MOST_GENERATIONS = 1 << 63

#: Advice for a damaged file.
RESTORE = "Restore all files of the directory, or create the home again with DiskHome(..., overwrite=True)"


class HomeError(ValueError):
    """A persistent home cannot be used: it is another model's, outdated, damaged, or in use. It was not changed."""


@dataclass(frozen=True)
class Manifest:
    """The fields of the manifest, in the order of the format."""

    #: Whether the home was closed after its contents were last written.
    clean: bool
    contents_bytes: int
    description_bytes: int
    #: How often the home was opened; equal on all ranks of a mesh.
    generation: int
    #: Random identity of the home.
    home: bytes
    description_digest: bytes

    def pack(self) -> bytes:
        """The manifest as one page."""
        fields = _FIELDS.pack(MAGIC, VERSION, *astuple(self))
        return (fields + digest(fields)).ljust(PAGE_BYTES, b"\0")


def digest(data: bytes) -> bytes:
    """Cryptographic hash of a few bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def file_bytes(contents_bytes: int, description_bytes: int) -> int:
    """Size of a file."""
    return whole_pages(contents_bytes) + whole_pages(description_bytes) + PAGE_BYTES


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Reads the manifest and the description.

    Raises HomeError for another format or version, damage, or a file not of the recorded size.
    """
    fd = _open_regular(path)
    try:
        size = os.fstat(fd).st_size
        page = os.pread(fd, PAGE_BYTES, max(0, size - PAGE_BYTES))
        manifest = _unpacked(page, size, path)
        description = os.pread(fd, manifest.description_bytes, whole_pages(manifest.contents_bytes))
    finally:
        os.close(fd)
    if digest(description) != manifest.description_digest:
        raise HomeError(f"{path}: the description of the tensors does not match its checksum. {RESTORE}")
    return manifest, description


def _unpacked(page: bytes, size: int, path: Path) -> Manifest:
    """The fields of the last page of a file of ``size`` bytes; raises HomeError for those of no home."""
    if len(page) != PAGE_BYTES or not page.startswith(MAGIC):
        raise HomeError(
            f"{path}: expected a file that ends with a manifest of this format, got {size:,} bytes without one: a file "
            f"of another program, or a truncated one. Use another directory, or restore the file"
        )
    version = int.from_bytes(page[len(MAGIC) : len(MAGIC) + 4], "little")
    if version != VERSION:
        raise HomeError(
            f"{path}: expected format version {VERSION}, got {version}. Open it with the release that wrote it and "
            f"save a checkpoint there; load that into a new home, DiskHome(..., overwrite=True)"
        )
    fields = page[: _FIELDS.size]
    if page != (fields + digest(fields)).ljust(PAGE_BYTES, b"\0"):
        raise HomeError(f"{path}: the manifest does not match its checksum, it is damaged. {RESTORE}")
    _, _, clean, *rest = _FIELDS.unpack(fields)
    manifest = Manifest(bool(clean), *rest)
    if clean > 1 or not 0 < manifest.generation < _MOST_GENERATIONS:
        raise HomeError(
            f"{path}: expected 0 or 1 as clean and a generation from 1 on, got clean={clean}, "
            f"generation={manifest.generation}; the manifest is damaged. {RESTORE}"
        )
    expected = file_bytes(manifest.contents_bytes, manifest.description_bytes)
    if size != expected:
        raise HomeError(f"{path}: expected {expected:,} bytes, got {size:,}; it is incomplete. {RESTORE}")
    return manifest


def _open_regular(path: Path) -> int:
    """Opens a file of a home to read. Raises HomeError for a link, which leads out of it, or a special file."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise HomeError(f"{path}: expected a regular file, got a link, a directory or a special file. {RESTORE}")
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_of_a_home(path: Path) -> bool:
    """Whether a file ends with a manifest of any version, which only homes have."""
    try:
        fd = _open_regular(path)
    except (OSError, HomeError):
        return False
    try:
        at = os.fstat(fd).st_size - PAGE_BYTES
        return at >= 0 and os.pread(fd, len(MAGIC), at) == MAGIC
    finally:
        os.close(fd)


def write_manifest(file: StoredFile, manifest: Manifest, description: bytes | None = None) -> None:
    """Writes the manifest of a file (and the description of a new one); returns once it is on the disk."""
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
