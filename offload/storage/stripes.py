"""Deals the bytes of a file over files in several directories, as RAID 0 does, so that several disks transfer at once.

::

    bytes                stripe 0 | stripe 1 | stripe 2 | stripe 3 | stripe 4 (shorter)
    file in directory a  stripe 0 | stripe 2 | stripe 4
    file in directory b  stripe 1 | stripe 3

The stripes of a directory are adjacent in its file. Files begin in different directories, so that small ones, and the
same places of large ones (weights, gradient and moments of one parameter), are on different disks.

Guarantees
    * A byte has the same offset within its page as in a single file, so direct I/O moves as much without a copy.
    * The mapping of a striped file is one range of addresses, as that of a single file; it outlives the files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["STRIPE_BYTES", "Extent", "StoredFile", "Stripes", "named"]

#: Bytes of a stripe, a multiple of pages. Kept homes record it. Small enough that a block of an optimizer is on two
#: disks, and large enough for the rate of a disk in one request; and each stripe is a mapping, of which a process may
#: have 65,530 (``vm.max_map_count``): those of 512 GiB.
STRIPE_BYTES = 8 << 20

#: Linux's, which :mod:`mmap` does not name.
_MAP_FIXED = 0x10

_MAP_FAILED = ctypes.c_void_p(-1).value


class Extent(NamedTuple):
    """Bytes ``[begin, end)`` of a whole, which are in one file; ``shift`` leads from them to the bytes of the file."""

    file: int
    begin: int
    end: int
    shift: int


@dataclass(frozen=True)
class Stripes:
    """How bytes are dealt over ``count`` files, from the file with the index ``first`` on."""

    count: int = 1
    first: int = 0
    stripe_bytes: int = field(default_factory=lambda: STRIPE_BYTES)

    def extents(self, begin: int, end: int) -> Iterator[Extent]:
        """The file, and the offset in it, of each run of the bytes ``[begin, end)``."""
        if self.count == 1:
            yield Extent(0, begin, end, 0)
            return
        while begin < end:
            stripe = begin // self.stripe_bytes
            until = min(end, (stripe + 1) * self.stripe_bytes)
            shift = (stripe // self.count - stripe) * self.stripe_bytes
            yield Extent((self.first + stripe) % self.count, begin, until, shift)
            begin = until

    def part_bytes(self, nbytes: int, file: int) -> int:
        """How many of ``nbytes`` are in the file with this index."""
        if self.count == 1:
            return nbytes
        whole, rest = divmod(nbytes, self.stripe_bytes)
        turn = (file - self.first) % self.count
        stripes = len(range(turn, whole, self.count))
        return stripes * self.stripe_bytes + (rest if whole % self.count == turn else 0)


@dataclass(frozen=True)
class StoredFile:
    """One file, or one in each of several directories over which its bytes are dealt."""

    paths: tuple[Path, ...]
    stripes: Stripes = field(default_factory=Stripes)
    #: Device and number of each file; None: any file of that name.
    inodes: tuple[tuple[int, int], ...] | None = None

    def as_it_is(self) -> StoredFile:
        """These files, and no others that later take their names."""
        found = map(os.stat, self.paths)
        return replace(self, inodes=tuple((each.st_dev, each.st_ino) for each in found))

    def open(self, index: int, flags: int = 0) -> int:
        """Opens one of the files. Raises FileNotFoundError if another one has its name, as if it was removed."""
        path = self.paths[index]
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        found = os.fstat(fd)
        if self.inodes is None or self.inodes[index] == (found.st_dev, found.st_ino):
            return fd
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "the file was moved, and another one has its name", str(path))

    @property
    def name(self) -> str:
        """Name of the file, the same in all directories."""
        return self.paths[0].name

    def extents(self, begin: int, end: int) -> Iterator[Extent]:
        """See :meth:`Stripes.extents`; of ``paths``."""
        return self.stripes.extents(begin, end)

    def part_bytes(self, nbytes: int) -> list[int]:
        """How many of ``nbytes`` are in each file."""
        return [self.stripes.part_bytes(nbytes, file) for file in range(len(self.paths))]

    def map(self, nbytes: int) -> Tensor:
        """A shared mapping of the first ``nbytes``, flat, uint8. Raises OSError."""
        name = str(self.paths[0])
        if len(self.paths) == 1 and name.encode(errors="ignore") == os.fsencode(name):  # torch takes UTF-8 only
            return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        return _map_striped(self, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)

    def unlink(self) -> None:
        """Removes the files that there still are."""
        for path in self.paths:
            path.unlink(missing_ok=True)


def named(paths: Sequence[Path]) -> str:
    """Directories as errors name them."""
    return ", ".join(repr(str(path)) for path in paths)


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int, offset: int) -> int | None:
    """The system call, which :mod:`mmap` does not offer for an address."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    mapped: int | None = call(address, nbytes, protection, flags, descriptor, offset)
    return mapped


def _munmap(address: int, nbytes: int) -> None:
    """The system call."""
    call = ctypes.CDLL(None).munmap
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    call(address, nbytes)


def _addresses(nbytes: int) -> Tensor:
    """A range of addresses; what is mapped there is unmapped with the tensor. Raises OSError.

    They are reserved as pages that may only be read: these count as memory nowhere, however many they are.
    """
    address = _mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot reserve {nbytes:,} bytes of addresses: {os.strerror(number)}")
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit of the interpreter: threads may still use the tensor then.
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _map_striped(file: StoredFile, nbytes: int) -> Tensor:
    tensor = _addresses(nbytes)
    descriptors: list[int] = []
    try:
        for index in range(len(file.paths)):
            descriptors.append(file.open(index))
        for extent in file.extents(0, nbytes):
            address = _mmap(
                tensor.data_ptr() + extent.begin,
                extent.end - extent.begin,
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptors[extent.file],
                extent.begin + extent.shift,
            )
            if address != tensor.data_ptr() + extent.begin:
                number = ctypes.get_errno()
                raise OSError(
                    number,
                    f"cannot map {nbytes:,} bytes in stripes of {file.stripes.stripe_bytes:,}: {os.strerror(number)}. "
                    f"Each stripe is one mapping; raise vm.max_map_count, or use fewer bytes",
                    str(file.paths[extent.file]),
                )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return tensor
