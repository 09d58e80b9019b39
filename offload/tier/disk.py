"""A directory as a home: shards rest in files, and their parameters are views of the mapped files.

The same bytes are seen in two ways. ``Block.tensor`` is a shared mapping of the file, so that an optimizer, a
``state_dict`` or any other code finds current values in ``Parameter.data`` and may write there; its pages are the
kernel's to drop. The streaming engine reads and writes with explicit calls instead, in large pieces and on a lane,
because a page fault in the middle of a matrix product is a wait that nobody can hide.

Guarantees
    * Files are made new, under a name that did not exist; nothing that lay in the directory before is ever read.
    * All bytes of a file are reserved when it is made, so a full disk is an error at construction, not a lost page.
    * The files go with the model, at interpreter exit at the latest. What a killed process left behind is removed by
      the next model that is made in the same directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.tier.contract import Block, Scratch, Tier, bytes_of

__all__ = ["DiskTier"]

_PREFIX = "gradstream-"


def _transfer(call: Callable[..., int], fd: int, tensor: Tensor, offset: int, what: str) -> None:
    """Reads or writes all bytes of a flat uint8 host tensor at a file offset; one call moves 2 GiB at the most."""
    buffer = memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
    done = 0
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        if moved == 0:
            raise OSError(f"{what}: the file ends after {offset + done:,} bytes, expected {offset + len(buffer):,}")
        done += moved


class DiskBlock(Block):
    """One file, mapped."""

    def __init__(self, path: Path, nbytes: int, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._fd)
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            os.unlink(path)
            raise OSError(error.errno, f"cannot reserve {nbytes:,} bytes: {error.strerror}", str(path)) from error
        self.tensor = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        self._staging: Tensor | None = None

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Reads the file, straight into ``destination`` where that is host memory."""
        destination = destination[: self.nbytes - offset]
        target = destination
        if destination.device.type != "cpu":
            if self._staging is None:
                self._staging = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
            target = self._staging[: destination.numel()]
        _transfer(os.preadv, self._fd, target, offset, str(self._path))
        if target is not destination:
            destination.copy_(target, non_blocking=True)

    def staged(self) -> Tensor:
        """A copy, read in one go: page faults piece by piece would be slower."""
        copy = torch.empty(self.nbytes, dtype=torch.uint8)
        _transfer(os.preadv, self._fd, copy, 0, str(self._path))
        return copy

    def write(self, source: Tensor, offset: int) -> None:
        """Writes to the file."""
        _transfer(os.pwritev, self._fd, source.cpu(), offset, str(self._path))


class _Ticket(NamedTuple):
    offset: int
    nbytes: int
    like: Tensor  # on the meta device: shape, strides and type


class DiskScratch(Scratch):
    """Boundaries in a file without a name, which the system removes whatever happens."""

    def __init__(self, tier: DiskTier, device: torch.device) -> None:
        self.name = tier.name
        self._tier = tier  # whose folder must live until the file is open
        self._device = device
        self._opened: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}

    @property
    def _fd(self) -> int:
        if self._opened is None:  # at the first use: most steps keep their boundaries in memory
            self._opened, path = tempfile.mkstemp(prefix="boundaries-", dir=self._tier.folder)
            os.unlink(path)
            self._finalizer = weakref.finalize(self, os.close, self._opened)
        return self._opened

    def store(self, tensor: Tensor) -> object:
        """Writes a tensor; room of the same size that was released is used again."""
        tensor = tensor.resolve_conj().resolve_neg()
        like = torch.empty_like(tensor, device="meta")
        dense = (
            tensor.cpu() if like.stride() == tensor.stride() else torch.empty_like(tensor, device="cpu").copy_(tensor)
        )
        data = bytes_of(dense)
        nbytes = data.numel()
        free = self._free.get(nbytes)
        offset = free.pop() if free else self._end
        if offset == self._end:
            self._end += nbytes
        if nbytes:
            _transfer(os.pwritev, self._fd, data, offset, "boundary file")
        return _Ticket(offset, nbytes, like)

    def fetch(self, ticket: object) -> Tensor:
        """Reads a tensor back."""
        assert isinstance(ticket, _Ticket)
        rest = torch.empty_like(ticket.like, device="cpu")
        if ticket.nbytes:
            _transfer(os.preadv, self._fd, bytes_of(rest), ticket.offset, "boundary file")
        return rest.to(self._device)

    def release(self, ticket: object) -> None:
        """Gives room back."""
        assert isinstance(ticket, _Ticket)
        self._free.setdefault(ticket.nbytes, []).append(ticket.offset)

    def close(self) -> None:
        """Removes the file."""
        if self._opened is not None:
            self._finalizer()


class DiskTier(Tier):
    """Blocks as files in a folder of their own below ``directory``."""

    blocking_io = True

    def __init__(self, directory: str | os.PathLike[str], device: torch.device) -> None:
        root = Path(directory)
        try:
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root)
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            raise OSError(
                error.errno, f"offload_device must be a directory that can be written to: {error.strerror}", str(root)
            ) from error
        self.name = f"disk ({root})"
        kind = _file_system(root)
        if kind in ("tmpfs", "ramfs"):
            warnings.warn(
                f"offload_device {str(root)!r} is memory ({kind}): shards that rest there take as much of it as "
                f"before; pass a directory on a disk",
                RuntimeWarning,
                stacklevel=5,
            )
        self._device = device
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._numbers = itertools.count()
        self._finalizer = weakref.finalize(self, _remove, self.folder, self._lock)

    def allocate(self, nbytes: int, label: str) -> Block:
        """A new file of ``nbytes``."""
        return DiskBlock(self.folder / f"{next(self._numbers):04d}-{label}", nbytes, self._device)

    def scratch(self) -> Scratch | None:
        """A file without a name."""
        return DiskScratch(self, self._device)

    def close(self) -> None:
        """Removes the files' names; their room is free once nobody maps them."""
        self._finalizer()


def _file_system(path: Path) -> str:
    """Type of the file system that holds ``path``, or "" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    resolved = path.resolve()
    holding = [(len(mount[1]), mount[2]) for mount in mounts if resolved.is_relative_to(mount[1])]
    return max(holding, default=(0, ""))[1]


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def _sweep(root: Path) -> None:
    """Removes the folders of processes that are gone: those whose lock nobody holds."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made at this moment, or not ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        _remove(folder, lock)
