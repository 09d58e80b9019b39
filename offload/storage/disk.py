"""Stores shards in files of a directory; their parameters are views of the memory-mapped files.

``Block.tensor`` is a shared mapping of the file, so an optimizer, a ``state_dict`` or any other code reads current
values from ``Parameter.data`` and may write to it; the kernel may drop its pages. The streaming engine makes explicit
read and write calls in large pieces on a lane, since a page fault during a matrix product cannot be overlapped. These
calls bypass the page cache where that is faster (:mod:`offload.storage.page_cache`).

Guarantees
    * Every file is new and has no name; no file that was in the directory before is ever read.
    * All bytes of a file are reserved at creation, so a full disk is an error of the constructor, not a lost page.
    * The system frees a file with its last user, however the process ends.
    * A block outlives its file's descriptor: its mapping stays valid.
"""

from __future__ import annotations

import copy
import os
import resource
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload.machine import file_system
from offload.storage.buffer import on_own_storage, view_memory, whole_pages
from offload.storage.contract import Block, Scratch, Tier, bytes_of
from offload.storage.page_cache import PageCache
from offload.storage.transfer import CudaLink, Link, Transfers, move_all
from pipe.freed import WhenFreed

__all__ = ["DiskBlock", "DiskScratch", "DiskTier", "reserve"]

#: Files that a process may have open, if the system lets it.
_MOST_FILES = 1 << 16


def _new_file(folder: Path, label: str) -> int:
    """The descriptor of a new file, which has no name any more; tools that list open files show the ``label``."""
    fd, path = tempfile.mkstemp(prefix=f"gradstream-{label}-", dir=folder)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


# --- Stores boundaries on disk --------------------------------------------------------------------------------------


class DiskScratch(Scratch):
    """Boundaries in one file of a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._fd: int | None = None
        self._file_bytes = 0

    def _move(self, call: Callable[..., int], data: Tensor, offset: int) -> None:
        if self._fd is None:  # at first use: most steps keep their boundaries in memory
            self._fd = _new_file(self._folder, "boundaries")
            self._closes = WhenFreed(partial(os.close, self._fd))
        move_all(call, self._fd, view_memory(data), offset, "boundary file")

    def store(self, tensor: Tensor) -> Callable[[Tensor], None]:
        """Writes a tensor behind those before it."""
        tensor = tensor.resolve_conj().resolve_neg()
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        dense = tensor.cpu() if is_dense else torch.empty_like(tensor, device="cpu").copy_(tensor)
        offset = self._file_bytes
        self._file_bytes += dense.nbytes
        if dense.numel():
            self._move(os.pwritev, bytes_of(dense), offset)
        return partial(self.fetch, offset)

    def fetch(self, offset: int, destination: Tensor) -> None:
        """Reads a tensor back."""
        if not destination.numel():
            return
        read = destination if destination.device.type == "cpu" else torch.empty_like(destination, device="cpu")
        self._move(os.preadv, bytes_of(read), offset)
        if read is not destination:
            destination.copy_(read)

    def close(self) -> None:
        """Removes the file."""
        if self._fd is not None:
            self._closes()


class DiskBlock(Block):
    """The first ``nbytes`` of a file, mapped. It closes the descriptor; errors call the file ``path``."""

    #: Where it begins in the file.
    _begin = 0

    def __init__(self, fd: int, path: Path, nbytes: int, transfers: Transfers, *, cyclic: bool = False) -> None:
        self.fd, self._path, self._transfers = fd, path, transfers
        # A finalizer may be called too early, and another file could have the number then.
        self._closes = WhenFreed(partial(os.close, fd))
        # A shared mapping outlives the file. torch takes names in UTF-8 only.
        self.tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        self._usage = transfers.cache.register(nbytes, cyclic=cyclic)
        self._unregisters = WhenFreed(partial(transfers.cache.unregister, self._usage))

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Reads the file, without a copy if ``destination`` is host memory."""
        destination = destination[: self.nbytes - offset]
        self._transfers.move(self.fd, destination, self._begin + offset, self._path, self._usage, write=False)

    def write(self, source: Tensor, offset: int) -> None:
        """Writes to the file."""
        assert offset + source.numel() <= self.nbytes
        self._transfers.move(self.fd, source, self._begin + offset, self._path, self._usage, write=True)

    def part(self, offset: int, nbytes: int) -> Block:
        """See :meth:`Block.part`. The file is closed with the last of its parts."""
        part = copy.copy(self)
        part._begin += offset
        part.tensor = on_own_storage(self.tensor[offset : offset + nbytes])
        return part


def reserve(fd: int, path: Path, file_bytes: int, wanted_bytes: int) -> None:
    """Allocates the disk space of a new file."""
    try:
        if file_bytes:
            os.posix_fallocate(fd, 0, file_bytes)
    except OSError as error:
        raise OSError(error.errno, f"cannot reserve {wanted_bytes:,} bytes: {error.strerror}", str(path)) from error


class DiskTier(Tier):
    """Blocks as files in ``directory``, which is created if it does not exist.

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
        # A shard has two files, which stay open. The usual limit of 1,024 is for programs that call select().
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= soft < (most := min(hard, _MOST_FILES) if hard >= 0 else _MOST_FILES):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            os.close(_new_file(self._root, "probe"))
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload_device must be a directory that can be written to: {error.strerror}",
                str(self._root),
            ) from error
        self.name = f"disk ({self._root})"
        kind = file_system(self._root)
        if kind in ("tmpfs", "ramfs"):
            warnings.warn(
                f"offload_device {str(self._root)!r} is memory ({kind}), so storing shards there saves none; pass a "
                f"directory on a disk",
                RuntimeWarning,
                stacklevel=6,  # where offload() was called
            )
        self._device = device
        link = link or (CudaLink(device) if device.type == "cuda" else Link())
        self.transfers = Transfers(PageCache(self._root, direct), link)

    @property
    def staging_bytes(self) -> int:
        """Buffers of direct transfers and of transfers to an accelerator."""
        return self.transfers.staging.nbytes

    def limit_staging(self, nbytes: int) -> None:
        """Limits the buffers, which are not allocated yet."""
        if not self.transfers.staging.nbytes:
            self.transfers.limit_staging(nbytes)

    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A new file of ``nbytes``; its space is freed with the block and its last mapping."""
        path, fd = self._root / label, _new_file(self._root, label)
        try:
            reserve(fd, path, whole_pages(nbytes), nbytes)
        except BaseException:
            os.close(fd)
            raise
        return DiskBlock(fd, path, nbytes, self.transfers, cyclic=cyclic)

    def scratch(self) -> Scratch | None:
        """Storage of boundaries in a file of their own."""
        return DiskScratch(self.name, self._root)
