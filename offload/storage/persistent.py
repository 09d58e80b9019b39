"""Stores weights and buffers in a file that outlives the model: the next model adopts it without a copy.

::

    directory/model.home      weights of all layers, and buffers
    directory/home.json       the manifest: which tensors these are, and whether the home was closed; replaced at once
    directory/home.lock       locked by the model that uses the home

Gradients, optimizer states and boundaries are in files without names.

Weights lie layer by layer, so the file does not depend on the cuts into shards: a model of the same layers adopts the
home with any cuts (:mod:`offload.streaming.layer_homes`).

Guarantees
    * The file is adopted only if it is complete, was closed, and holds the same tensors at the same offsets. It is
      neither copied nor initialised. A refused one is not changed.
    * From :meth:`PersistentTier.mark_open`, before the first write, until :meth:`PersistentTier.mark_closed` the
      manifest is not clean, so a home that a crash left half written is recognised.
    * Files are overwritten only on request, and only one model at a time uses a home.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from offload.storage.buffer import whole_pages
from offload.storage.contract import Block
from offload.storage.disk import DiskBlock, DiskTier, reserve
from offload.storage.home import DiskHome
from offload.untrusted import naming, read_object, sum_of_values, sync, write_new
from pipe.process import finalize_here

__all__ = ["MANIFEST", "HomeError", "Manifest", "PersistentTier", "read_manifest"]

_FORMAT = "home 5"
_FILE, MANIFEST = "model.home", "home.json"

#: Advice for a damaged file.
RESTORE = "Restore all files of the directory, or create the home again with DiskHome(..., overwrite=True)"


class HomeError(ValueError):
    """A persistent home cannot be used: it is another model's, outdated, damaged, or in use. It was not changed."""


@dataclass(frozen=True)
class Manifest:
    """The fields of the manifest."""

    #: Whether the home was closed after its contents were last written.
    clean: bool
    nbytes: int
    #: A line for each tensor, so that an error can name the first one that differs.
    tensors: list[str]
    format: str = _FORMAT

    def write(self, folder: Path) -> None:
        """Replaces the one in a directory; returns once it is on the disk."""
        fields, new = asdict(self), folder / f"{MANIFEST}.new"
        new.unlink(missing_ok=True)
        write_new(new, [json.dumps(fields | {"sum": sum_of_values(fields)}, indent=1).encode()])
        os.replace(new, folder / MANIFEST)
        sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the home in a directory.

    Raises HomeError for another format, damage, or a file not of the recorded size.
    """
    path = folder / MANIFEST
    try:
        found = read_object(path, "manifest")
        if found.pop("sum", None) != sum_of_values(found):
            raise ValueError(f"{path}: damaged, or of another program")
    except (ValueError, FileNotFoundError) as error:
        raise HomeError(f"expected the manifest of a home: {error}. {RESTORE}") from error
    if found["format"] != _FORMAT:
        raise HomeError(
            f"{path}: expected the format {_FORMAT!r}, got {found['format']!r}. Open it with the release that "
            f"wrote it and save a checkpoint there; load that into a new home, DiskHome(..., overwrite=True)"
        )
    manifest = Manifest(**found)
    size, expected = _size_of(folder / _FILE), whole_pages(manifest.nbytes)
    if size != expected:
        raise HomeError(f"{folder / _FILE}: expected {expected:,} bytes, got {size:,}; it is incomplete. {RESTORE}")
    return manifest


def _size_of(path: Path) -> int:
    """Bytes of a file of a home. Raises HomeError for a link, which leads out of it, or a special file."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise HomeError(f"{path}: expected a regular file, got one of mode {stat.filemode(found.st_mode)}. {RESTORE}")
    return found.st_size


@dataclass
class _Usage:
    """The use of a home by one tier, which ends when the tier is closed or collected."""

    directory: Path
    #: Descriptors: of the file that is locked, and of the directory, which may be moved meanwhile.
    lock: int
    folder: int
    #: Whether the file is new, and to be removed if the model's constructor fails.
    created: bool = False
    #: Whether the manifest says that the home is not clean.
    open: bool = False

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self.created:
                _remove(self.directory)
        for fd in (self.lock, self.folder):
            with contextlib.suppress(OSError):
                os.close(fd)
        if self.open:
            warnings.warn(
                f"the model with the persistent home in {str(self.directory)!r} ended without close(): the home is "
                f"marked as open, and the next model will refuse it",
                RuntimeWarning,
                stacklevel=2,
            )


def _remove(folder: Path) -> None:
    # The manifest first. Without this, one that is left after a kill would vouch for a file that is made later.
    for name in (MANIFEST, f"{MANIFEST}.new", _FILE):
        (folder / name).unlink(missing_ok=True)


class PersistentTier(DiskTier):
    """Weights and buffers in a persistent file; gradients, optimizer states and boundaries in temporary ones.

    Call in this order: :meth:`adopt`, :meth:`contents`, :meth:`mark_open`, :meth:`mark_closed`. Raises HomeError if
    another model uses the home.
    """

    keeps = True

    def __init__(self, home: DiskHome, device: torch.device) -> None:
        super().__init__(home, device, direct=home.direct)
        self._home = home
        self._path = self._root / _FILE
        self._manifest = Manifest(False, 0, [])
        self._new = True
        self._contents: DiskBlock | None = None
        path = self._root / "home.lock"
        if os.path.lexists(path):
            _size_of(path)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._usage = _Usage(self._root, lock, os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
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
        layers have no values of their own. Raises HomeError, which names the file and what to do, if the unchanged home
        cannot be used.
        """
        root, path = self._root, self._path
        mine = self._manifest = Manifest(False, nbytes, [f"bytes are {sys.byteorder}-endian", *lines])
        if self._home.overwrite or not os.path.lexists(path):
            _remove(root)
            return False
        if not blank:
            raise HomeError(
                f"{str(root)!r} holds a home already, and the layers have values, too. Build the layers on the "
                f"meta device (and without pretrained=) to adopt the home; or replace it with "
                f"DiskHome(..., overwrite=True); or use another directory"
            )
        found = read_manifest(root)
        if replace(found, clean=False) != mine:
            raise HomeError(
                f"{path}: expected {_difference(mine.tensors, found.tensors)}. Pass the layers that the home was "
                f"created with, or use another directory"
            )
        if not found.clean and not self._home.recover:
            raise HomeError(
                f"{path}: expected a home that was closed, but the model that used it ended without close(), and may "
                f"have left it incomplete. Load the last checkpoint into a new home, DiskHome(..., overwrite=True); or "
                f"use it as it is, DiskHome(..., recover=True)"
            )
        if not found.clean:
            warnings.warn(
                f"recovering the home in {str(root)!r}, whose model ended without close(): its contents cannot be "
                f"verified. Shards may be of different steps, and buffers are those of the last close(), with "
                f"parameters outside of blocks; compare with a checkpoint or an evaluation before you continue",
                RuntimeWarning,
                stacklevel=2,
            )
        self._new = False
        return True

    def contents(self) -> Block:
        """The weights, and what is stored behind them: the adopted file, or a new one."""
        nbytes = self._manifest.nbytes
        if self._contents is None:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if self._new else 0)
            fd = os.open(self._path, flags, 0o600)
            try:
                if self._new:
                    self._usage.created = True
                    reserve(fd, self._path, whole_pages(nbytes), nbytes)
            except BaseException:
                os.close(fd)
                raise
            self._contents = DiskBlock(fd, self._path, nbytes, self.transfers)
        return self._contents

    def weights(self, nbytes: int) -> Block:
        """The first bytes of the contents."""
        return self.contents().part(0, nbytes)

    def mark_open(self) -> None:
        """Marks the manifest as not clean, before the contents change: the model is constructed."""
        self._write(self._manifest)
        self._usage.created, self._usage.open = False, True

    def _write(self, manifest: Manifest) -> None:
        if self._contents is None:
            return
        with naming(self._root / MANIFEST):  # and not its place in /proc
            manifest.write(Path(f"/proc/self/fd/{self._usage.folder}"))

    def mark_closed(self) -> None:
        """Writes a clean manifest and unlocks the home, after the last write.

        After an OSError the home is open, and this may be called again.
        """
        if not self._usage.open:
            return
        if self._contents is not None:
            # Contents -> manifest. Without this, a power cut leaves a clean manifest of what was never written.
            os.fsync(self._contents.fd)
        self._write(replace(self._manifest, clean=True))
        self._usage.open = False
        self._release_home()

    def close(self) -> None:
        """Unlocks the home, with or without a clean manifest."""
        self._release_home()


def _difference(expected: list[str], got: list[str]) -> str:
    """The first tensor in which two descriptions differ."""
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"'{ours}', got '{theirs}'"
    return f"{len(expected) - 1} tensors, got {len(got) - 1}"
