"""Stores weights and buffers in a file that outlives the model: the next model adopts it without a copy.

::

    directory/model.home      weights of all layers, buffers, and a manifest (offload.storage.persistent)
    directory/home.lock       locked by the model that uses the home

Gradients, optimizer states and boundaries are in files without names.

With a mesh of processes each rank has such a directory of its own below the one that is given, ``rank0-of-2``. What it
has opened is compared with what its peers have.

Weights lie layer by layer, so the file does not depend on the cuts into shards: a model of the same layers adopts the
home with any cuts (:mod:`offload.streaming.layer_homes`).

Guarantees
    * The file is adopted only if it is complete, was closed, and holds the same tensors at the same offsets; on all
      ranks of a mesh, of one home and one generation. It is neither copied nor initialised. A refused one is not
      changed.
    * From :meth:`PersistentTier.mark_open`, before the first write, until :meth:`PersistentTier.mark_closed` the
      manifest is not clean, so a home that a crash left half written is recognised.
    * Files are overwritten only on request, and only one model at a time uses a home.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.storage.buffer import PAGE_BYTES, whole_pages
from offload.storage.contract import Block
from offload.storage.disk import DiskBlock, DiskTier, reserve
from offload.storage.home import DiskHome
from offload.storage.transfer import move_all
from pipe.process import finalize_here

__all__ = ["RANKS", "HomeError", "Manifest", "PersistentTier", "digest", "homes_in", "read_manifest", "write_manifest"]

# --- The manifest at the end of the file of a persistent home: identity and state (closed or not) --------------------
#
# ::
#
#     contents, whole pages | description, whole pages | manifest, one page
#
# The contents are first, so that mappings and direct I/O are aligned. The description is text, one line per tensor, so
# that an error can name the first tensor that differs. The manifest is a JSON object and its digest in one page, which
# a disk writes atomically.

_FORMAT = "home 4"

#: Advice for a damaged file.
RESTORE = "Restore all files of the directory, or create the home again with DiskHome(..., overwrite=True)"


class HomeError(ValueError):
    """A persistent home cannot be used: it is another model's, outdated, damaged, or in use. It was not changed."""


@dataclass(frozen=True)
class Manifest:
    """The fields of the manifest."""

    #: Whether the home was closed after its contents were last written.
    clean: bool
    contents_bytes: int
    description_bytes: int
    #: How often the home was opened; equal on all ranks of a mesh.
    generation: int
    #: Random identity of the home.
    home: str
    description_digest: str
    format: str = _FORMAT

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return whole_pages(self.contents_bytes) + whole_pages(self.description_bytes) + PAGE_BYTES

    def pack(self) -> bytes:
        """The manifest as one page."""
        fields = json.dumps(asdict(self)).encode()
        return (fields + digest(fields).encode()).ljust(PAGE_BYTES)


def digest(data: bytes) -> str:
    """Cryptographic hash of a few bytes, in 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """Reads the manifest and the description.

    Raises HomeError for another format, damage, or a file not of the recorded size.
    """
    fd = _open_regular(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        page = os.pread(fd, PAGE_BYTES, max(0, size - PAGE_BYTES)).rstrip(b" ")
        fields, sum = page[:-32], page[-32:]
        if digest(fields).encode() != sum:
            raise HomeError(
                f"{path}: expected a file that ends with a manifest, got {size:,} bytes without one: a truncated or "
                f"damaged file, or one of another program. Use another directory. {RESTORE}"
            )
        found = json.loads(fields)
        if found["format"] != _FORMAT:
            raise HomeError(
                f"{path}: expected the format {_FORMAT!r}, got {found['format']!r}. Open it with the release that "
                f"wrote it and save a checkpoint there; load that into a new home, DiskHome(..., overwrite=True)"
            )
        manifest = Manifest(**found)
        if size != manifest.file_bytes:
            raise HomeError(
                f"{path}: expected {manifest.file_bytes:,} bytes, got {size:,}; it is incomplete. {RESTORE}"
            )
        description = os.pread(fd, manifest.description_bytes, whole_pages(manifest.contents_bytes))
    finally:
        os.close(fd)
    if digest(description) != manifest.description_digest:
        raise HomeError(f"{path}: the description of the tensors does not match its checksum. {RESTORE}")
    return manifest, description


def _open_regular(path: Path, flags: int) -> int:
    """Opens a file of a home. Raises HomeError for a link, which leads out of it, or a special file."""
    reason: object = "a special file"
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = f"a link, a directory or a special file: {error.strerror}"
    raise HomeError(f"{path}: expected a regular file, got {reason}. {RESTORE}")


def write_manifest(fd: int, path: Path, manifest: Manifest, description: bytes | None = None) -> None:
    """Writes the manifest of a file (and the description of a new one); returns once it is on the disk."""
    if description is not None:
        move_all(os.pwritev, fd, memoryview(description), whole_pages(manifest.contents_bytes), path)
    # Contents -> manifest. Without this, a power cut leaves a clean manifest of contents that were never written.
    os.fsync(fd)
    move_all(os.pwritev, fd, memoryview(manifest.pack()), manifest.file_bytes - PAGE_BYTES, path)
    os.fsync(fd)


_FILE = "model.home"
#: Names of the directories of the ranks of a mesh.
RANKS = "rank*-of-*"


def homes_in(root: Path, folders: str | None = None) -> list[Path]:
    """The files of homes in a directory, or in ``folders`` of it."""
    found = [root] if folders is None else sorted(root.glob(folders))
    return [folder / _FILE for folder in found if os.path.lexists(folder / _FILE)]


@dataclass
class _Usage:
    """The use of a home by one tier, which ends when the tier is closed or collected."""

    directory: Path
    lock: int
    #: A new file, which is removed if the model's constructor fails.
    created: Path | None = None
    #: Whether the manifest says that the home is not clean.
    open: bool = False

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self.created is not None:
                self.created.unlink()
        with contextlib.suppress(OSError):
            os.close(self.lock)
        if self.open:
            warnings.warn(
                f"the model with the persistent home in {str(self.directory)!r} ended without close(): the home is "
                f"marked as open, and the next model will refuse it",
                RuntimeWarning,
                stacklevel=2,
            )


#: What one process found in its directory: why the home cannot be used, if it cannot; the manifest, if there is a home;
#: and the identity of a new home.
_Found = tuple[str | None, Manifest | None, str]


class PersistentTier(DiskTier):
    """Weights and buffers in a persistent file; gradients, optimizer states and boundaries in temporary ones.

    Call in this order: :meth:`adopt`, :meth:`contents`, :meth:`mark_open`, :meth:`mark_closed`. Raises HomeError if
    another model uses the home.

    ``exchange``: returns what each of the processes that store the model together answers; None if there is one.
    """

    keeps = True

    def __init__(
        self, home: DiskHome, device: torch.device, exchange: Callable[[Any], list[Any]] = lambda mine: [mine]
    ) -> None:
        super().__init__(home, device, direct=home.direct)
        self._home = home
        self.recovers = home.recover
        self._exchange = exchange
        self._path = self._root / _FILE
        self._manifest: Manifest | None = None
        self._new = True
        self._description = b""
        self._contents: DiskBlock | None = None
        lock = _open_regular(self._root / "home.lock", os.O_RDWR | os.O_CREAT)
        self._usage = _Usage(self._root, lock)
        self._release_home = finalize_here(self, _Usage.release, self._usage)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._release_home()
            raise HomeError(
                f"the home in {str(self._root)!r} is in use by another model, of this process or of another; close() "
                f"that one first, or use another directory"
            ) from error

    def adopt(self, lines: Sequence[str], nbytes: int, *, blank: bool) -> bool:
        """Verifies the home in the directory, if there is one; returns whether there is.

        ``lines``: one for each tensor in its ``nbytes``: name, type, shape, strides, offset. ``blank``: whether the
        layers have no values of their own. Raises HomeError, on all ranks, which names the file and what to do, if the
        unchanged home cannot be used.
        """
        self._description = "\n".join([f"bytes are {sys.byteorder}-endian", *lines]).encode()
        error, manifest = None, None
        try:
            manifest = self._checked(nbytes, blank=blank)
        except HomeError as found:
            error = found
        mine: _Found = None if error is None else str(error), manifest, secrets.token_hex(16)
        everybody: list[_Found] = self._exchange(mine)
        if error is not None:
            raise error
        self._compare(manifest, everybody)
        if manifest is None:
            kind = self._description
            self._manifest = Manifest(False, nbytes, len(kind), 1, everybody[0][2], digest(kind))
            return False
        last = max(other.generation for _, other, _ in everybody if other is not None)
        self._manifest, self._new = replace(manifest, generation=last), False
        return True

    def _checked(self, nbytes: int, *, blank: bool) -> Manifest | None:
        """The manifest of the file in the directory, which fits the model; None if there is no home."""
        root, path = self._root, self._path
        if self._home.overwrite:
            for each in homes_in(root):
                each.unlink()
        if not homes_in(root):
            others = sorted(each.parent.name for each in homes_in(root, RANKS))
            if others:
                raise HomeError(
                    f"{str(root)!r} holds the home of a mesh of processes ({others[0]}). Use as many processes, "
                    f"or load a checkpoint into a home in another directory"
                )
            return None
        if not blank:
            raise HomeError(
                f"{str(root)!r} holds a home already, and the layers have values, too. Build the layers on the "
                f"meta device (and without pretrained=) to adopt the home; or replace it with "
                f"DiskHome(..., overwrite=True); or use another directory"
            )
        manifest, got = read_manifest(path)
        if got != self._description or manifest.contents_bytes != nbytes:
            raise HomeError(
                f"{path}: expected {_difference(self._description, got)}. Pass the layers that the home was created "
                f"with, or use another directory"
            )
        if manifest.clean:
            return manifest
        if not self._home.recover:
            raise HomeError(
                f"{path}: expected a home that was closed, but the model that used it ended without close(), and may "
                f"have left it incomplete. Load the last checkpoint into a new home, DiskHome(..., overwrite=True); or "
                f"use it as it is, DiskHome(..., recover=True)"
            )
        warnings.warn(
            f"recovering the home in {str(root)!r}, whose model ended without close(): its contents cannot be "
            f"verified. Shards may be of different steps, and buffers are those of the last close(), with parameters "
            f"outside of blocks; compare with a checkpoint or an evaluation before you continue",
            RuntimeWarning,
            stacklevel=2,
        )
        return manifest

    def _compare(self, mine: Manifest | None, everybody: Sequence[_Found]) -> None:
        """Raises HomeError if the directories do not hold parts of one home and generation. All processes raise."""
        for rank, (error, other, _) in enumerate(everybody):
            if error is not None:
                raise HomeError(f"rank {rank} of the mesh cannot use its part of the home: {error}")
            if (other is None) != (mine is None):
                some, none = ("this rank", f"rank {rank}") if mine else (f"rank {rank}", "this rank")
                raise HomeError(
                    f"expected a home on all ranks of the mesh or on none, but {some} has its part and {none} has none "
                    f"(in {self._root} for this rank). {RESTORE}"
                )
        files = [other for _, other, _ in everybody if other is not None]
        if not files:
            return
        shut, opened = ({m.generation for m in files if m.clean is state} for state in (True, False))
        # A process that ended while it opened a home wrote nothing but its manifest, of the next generation.
        one_step = self._home.recover and len(shut) == len(opened) == 1 and opened == {min(shut) + 1}
        if len({m.home for m in files}) > 1 or not (len(shut | opened) == 1 or one_step):
            parts = (
                f"rank {k}: {m.home[:8]} {m.generation} {'closed' if m.clean else 'open'}" for k, m in enumerate(files)
            )
            raise HomeError(
                f"expected parts of one home and one generation in the directories of all ranks of the mesh, got "
                f"{', '.join(parts)} (home, generation, and whether it was closed). {RESTORE}"
            )

    def contents(self) -> Block:
        """The weights, and what is stored behind them: the adopted file, or a new one."""
        manifest = self._manifest
        assert manifest is not None
        if self._contents is None:
            fd = _open_regular(self._path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if self._new else 0))
            try:
                if self._new:
                    self._usage.created = self._path
                    reserve(fd, self._path, manifest.file_bytes, manifest.contents_bytes)
                    write_manifest(fd, self._path, manifest, self._description)
            except BaseException:
                os.close(fd)
                raise
            self._contents = DiskBlock(fd, self._path, manifest.contents_bytes, self.transfers)
        return self._contents

    def weights(self, nbytes: int) -> Block:
        """The first bytes of the contents."""
        return self.contents().part(0, nbytes)

    def mark_open(self) -> None:
        """Marks the manifest as not clean, before the contents change: the model is constructed."""
        assert self._manifest is not None
        if self._contents is not None and not self._new:
            self._manifest = replace(self._manifest, clean=False, generation=self._manifest.generation + 1)
            write_manifest(self._contents.fd, self._path, self._manifest)
        self._usage.created, self._usage.open = None, True

    def mark_closed(self) -> None:
        """Writes a clean manifest and unlocks the home, after the last write.

        After an OSError the home is open, and this may be called again.
        """
        if not self._usage.open:
            return
        assert self._manifest is not None
        if self._contents is not None:
            write_manifest(self._contents.fd, self._path, replace(self._manifest, clean=True))
        self._usage.open = False
        self._release_home()

    def close(self) -> None:
        """Unlocks the home, with or without a clean manifest."""
        self._release_home()


def _difference(expected: bytes, got: bytes) -> str:
    """The first tensor in which two descriptions differ."""
    theirs, ours = got.decode(errors="replace").splitlines(), expected.decode().splitlines()
    for line, other in zip(ours, theirs, strict=False):
        if line != other:
            return f"'{line}', got '{other}'"
    return f"{len(ours) - 1} tensors, got {len(theirs) - 1}"
