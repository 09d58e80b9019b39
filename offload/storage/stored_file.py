"""A file that holds a block: which one it is, however its name changes."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["StoredFile"]


@dataclass(frozen=True)
class StoredFile:
    """A file, by its path and, once it exists, by its number."""

    path: Path
    #: Device and number of the file; None: any file of that name.
    inode: tuple[int, int] | None = None

    def as_it_is(self) -> StoredFile:
        """This file, and no other that later takes its name."""
        found = os.stat(self.path)
        return replace(self, inode=(found.st_dev, found.st_ino))

    def open(self, flags: int = 0) -> int:
        """Opens the file. Raises FileNotFoundError if another one has its name, as if it was removed."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        found = os.fstat(fd)
        if self.inode is None or self.inode == (found.st_dev, found.st_ino):
            return fd
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "the file was moved, and another one has its name", str(self.path))

    def map(self, nbytes: int) -> Tensor:
        """A shared mapping of the first ``nbytes``, flat, uint8, which outlives the file. Raises OSError."""
        fd = self.open()
        try:
            # torch takes names in UTF-8 only, and this one is that of the open file.
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)
