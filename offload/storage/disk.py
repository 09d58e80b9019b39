"""Stores shards in files of a directory; their parameters are views of the memory-mapped files.

``Block.tensor`` is a shared mapping of the file, so an optimizer, a ``state_dict`` or any other code reads current
values from ``Parameter.data`` and may write to it; the kernel may drop its pages. The streaming engine makes explicit
read and write calls in large pieces on a lane, since a page fault during a matrix product cannot be overlapped. These
calls bypass the page cache where that is faster (:mod:`offload.storage.page_cache`).

Guarantees
    * Every file is new, under an unused name; no file that was in the directory before is ever read.
    * All bytes of a file are reserved at creation, so a full disk is an error of the constructor, not a lost page.
    * Files are removed with the model, or at interpreter exit. Files of a killed process are removed when the next
      model is made in the same directory.
    * A block outlives its file: its mapping stays valid.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import tempfile
import uuid
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.machine import file_system
from offload.storage.buffer import host_buffer, on_own_storage, view_memory, whole_pages
from offload.storage.contract import Block, Scratch, Tier, bytes_of
from offload.storage.page_cache import PageCache
from offload.storage.transfer import Link, StoredFile, Transfers, move_all, open_link
from pipe.freed import WhenFreed
from pipe.process import finalize_here

__all__ = ["DiskBlock", "DiskScratch", "DiskTier", "reserve"]


# --- Stores boundaries on disk, in an unlinked file, which the system removes however the process ends ---------------


class _Ticket(NamedTuple):
    """Place and layout of a stored tensor, without a meta tensor, which would fragment the heap.

    It would live as long as the step, between blocks that each cell allocates and frees, and the gaps would be too
    small for the next ones.
    """

    offset: int
    nbytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class DiskScratch(Scratch):
    """Boundaries in one unlinked file of a folder."""

    def __init__(self, name: str, folder: Path, folder_owner: object, device: torch.device) -> None:
        self.name = name
        self._folder = folder
        self._folder_owner = folder_owner  # keeps the folder until the file is open
        self._device = device
        self._opened: int | None = None
        self._file_bytes = 0
        self._free: dict[int, list[int]] = {}

    def _open(self) -> int:
        """Opens the file, at first use: most steps keep their boundaries in memory."""
        fd, path = tempfile.mkstemp(prefix="boundaries-", dir=self._folder)
        self._finalizer = WhenFreed(partial(os.close, fd))
        os.unlink(path)
        self._opened = fd
        return fd

    def _move(self, call: Callable[..., int], data: Tensor, offset: int) -> None:
        opened = self._open() if self._opened is None else self._opened
        move_all(call, opened, view_memory(data), offset, "boundary file")

    def store(self, tensor: Tensor) -> object:
        """Writes a tensor, into released space of the same size if there is any."""
        tensor = tensor.resolve_conj().resolve_neg()
        stride = torch.empty_like(tensor, device="meta").stride()
        dense = tensor.cpu() if stride == tensor.stride() else torch.empty_like(tensor, device="cpu").copy_(tensor)
        data = bytes_of(dense)
        nbytes = data.numel()
        free = self._free.get(nbytes)
        offset = free.pop() if free else self._file_bytes
        if offset == self._file_bytes:
            self._file_bytes += nbytes
        if nbytes:
            self._move(os.pwritev, data, offset)
        return _Ticket(offset, nbytes, tuple(tensor.size()), stride, tensor.dtype)

    def fetch(self, ticket: object) -> Tensor:
        """Reads a tensor back."""
        assert isinstance(ticket, _Ticket)
        tensor = torch.empty_strided(ticket.size, ticket.stride, dtype=ticket.dtype)
        if ticket.nbytes:
            self._move(os.preadv, bytes_of(tensor), ticket.offset)
        return tensor.to(self._device)

    def release(self, ticket: object) -> None:
        """Marks the space of a tensor as free."""
        assert isinstance(ticket, _Ticket)
        self._free.setdefault(ticket.nbytes, []).append(ticket.offset)

    def close(self) -> None:
        """Removes the file."""
        if self._opened is not None:
            self._finalizer()


_PREFIX = "gradstream-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")


class DiskBlock(Block):
    """The first ``nbytes`` of a file, mapped."""

    #: Where it begins in the file.
    _begin = 0

    def __init__(self, file: StoredFile, nbytes: int, transfers: Transfers, *, cyclic: bool = False) -> None:
        self._file = file.as_it_is()
        self._transfers = transfers
        self.tensor = file.map(nbytes)
        self._usage = transfers.cache.register(nbytes, cyclic=cyclic)
        weakref.finalize(self, transfers.cache.unregister, self._usage)

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Reads the file, without a copy if ``destination`` is host memory."""
        destination = destination[: self.nbytes - offset]
        try:
            self._transfers.read(self._file, destination, self._begin + offset, self._usage)
        except FileNotFoundError:
            destination.copy_(self.tensor[offset : offset + destination.numel()])

    def staged(self) -> Tensor:
        """A copy made by one large read, which is faster than page faults of the mapping."""
        copy = host_buffer(self.nbytes)
        self.read_into(copy)
        return copy

    def write(self, source: Tensor, offset: int) -> None:
        """Writes to the file."""
        assert offset + source.numel() <= self.nbytes
        try:
            self._transfers.write(self._file, source, self._begin + offset, self._usage)
        except FileNotFoundError:
            self.tensor[offset : offset + source.numel()].copy_(source)

    def part(self, offset: int, nbytes: int) -> Block:
        """See :meth:`Block.part`."""
        return _DiskPart(self, offset, nbytes)


class _DiskPart(DiskBlock):
    """A range of a block in a file."""

    def __init__(self, whole: DiskBlock, begin: int, nbytes: int) -> None:
        self._whole = whole  # the file goes with it
        self._file, self._transfers, self._usage = whole._file, whole._transfers, whole._usage
        self._begin = whole._begin + begin
        self.tensor = on_own_storage(whole.tensor[begin : begin + nbytes])


def reserve(path: Path, file_bytes: int, wanted_bytes: int) -> None:
    """Creates a file of zeros with all of its disk space allocated."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if file_bytes:
            os.posix_fallocate(fd, 0, file_bytes)
    except OSError as error:
        os.unlink(path)
        raise OSError(error.errno, f"cannot reserve {wanted_bytes:,} bytes: {error.strerror}", str(path)) from error
    finally:
        os.close(fd)


class DiskTier(Tier):
    """Blocks as files in a new folder below ``directory``, which is created if it does not exist.

    ``direct``: whether to bypass the page cache; None decides by size. ``link``: how bytes are copied to the compute
    device; tests pass one that delays copies.
    """

    blocking_io = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        device: torch.device,
        *,
        direct: bool | None = None,
        link: Link | None = None,
    ) -> None:
        # Without links, which may lead elsewhere before the next file is made.
        self._root = Path(os.path.realpath(directory))
        self.folder, self._lock = _new_folder(self._root)
        self.name = f"disk ({self._root})"
        kind = file_system(self._root)
        if kind in ("tmpfs", "ramfs"):
            warnings.warn(
                f"offload_device {str(self._root)!r} is memory ({kind}), so storing shards there saves none; pass a "
                f"directory on a disk",
                RuntimeWarning,
                stacklevel=5,
            )
        self._device = device
        self._numbers = itertools.count()
        self.transfers = Transfers(PageCache(self.folder, direct), link or open_link(device))
        self._finalizer = finalize_here(self, _remove, self.folder, self._lock)

    @property
    def staging_bytes(self) -> int:
        """Buffers of direct transfers and of transfers to an accelerator."""
        return self.transfers.staging.nbytes

    def limit_staging(self, nbytes: int) -> None:
        """Limits the buffers, which are not allocated yet."""
        if not self.transfers.staging.nbytes:
            self.transfers.limit_staging(nbytes)

    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A new file of ``nbytes``. It is unlinked with the block; its space is freed with its last mapping."""
        path = self.folder / f"{next(self._numbers):04d}-{label}"
        reserve(path, whole_pages(nbytes), nbytes)
        try:
            block = DiskBlock(StoredFile(path), nbytes, self.transfers, cyclic=cyclic)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finalize_here(block, path.unlink, True)
        return block

    def scratch(self) -> Scratch | None:
        """Storage of boundaries in an unlinked file."""
        return DiskScratch(self.name, self.folder, self, self._device)

    def close(self) -> None:
        """Removes the files; their space is freed with their last mapping."""
        self._finalizer()


def _new_folder(root: Path) -> tuple[Path, int]:
    """Makes a folder of this process, and locks it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        folder = root / f"{_PREFIX}{uuid.uuid4().hex}"
        unnamed, lock = root / f".{folder.name}", None
        try:
            unnamed.mkdir(mode=0o700)
            lock = os.open(unnamed, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with contextlib.suppress(OSError):  # where directories cannot be locked, those of killed processes stay
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Without this rename, another process could find the folder before it is locked, and remove it as that of
            # an ended process.
            os.rename(unnamed, folder)
        except BaseException:
            _remove(unnamed, lock)
            raise
        return folder, lock
    except OSError as error:
        raise OSError(
            error.errno, f"offload_device must be a directory that can be written to: {error.strerror}", str(root)
        ) from error


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        with contextlib.suppress(OSError):
            os.close(lock)


def _remove_stale(root: Path) -> None:
    """Removes the folders of ended processes: those with a name that only we give, and that can be locked."""
    for folder in root.glob(f"{_PREFIX}*"):
        if not _NAME.fullmatch(folder.name):
            continue  # the user's
        lock = None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if lock is not None:
                os.close(lock)
        else:
            _remove(folder, lock)
