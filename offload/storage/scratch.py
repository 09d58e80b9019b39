"""Boundaries on disk: a file without a name, which the system removes whatever happens."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.storage.buffer import view_memory
from offload.storage.contract import Scratch, bytes_of
from offload.storage.transfer import move_all

__all__ = ["DiskScratch"]


class _Ticket(NamedTuple):
    """Where a tensor is, and what it is like: in Python's own objects.

    A tensor on the meta device would say the same. But it would lie in the heap as long as the step lasts, between
    blocks that come and go with every cell, and what is freed around it is too small for the next one: the heap would
    grow with the number of cells.
    """

    offset: int
    nbytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class DiskScratch(Scratch):
    """Room in such a file."""

    def __init__(self, name: str, folder: Path, keeps_folder: object, device: torch.device) -> None:
        self.name = name
        self._folder = folder
        self._keeps_folder = keeps_folder  # until the file is open
        self._device = device
        self._opened: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}

    @property
    def _fd(self) -> int:
        if self._opened is None:  # at the first use: most steps keep their boundaries in memory
            self._opened, path = tempfile.mkstemp(prefix="boundaries-", dir=self._folder)
            os.unlink(path)
            self._finalizer = weakref.finalize(self, os.close, self._opened)
        return self._opened

    def store(self, tensor: Tensor) -> object:
        """Writes a tensor; room of the same size that was released is used again."""
        tensor = tensor.resolve_conj().resolve_neg()
        stride = torch.empty_like(tensor, device="meta").stride()
        dense = tensor.cpu() if stride == tensor.stride() else torch.empty_like(tensor, device="cpu").copy_(tensor)
        data = bytes_of(dense)
        nbytes = data.numel()
        free = self._free.get(nbytes)
        offset = free.pop() if free else self._end
        if offset == self._end:
            self._end += nbytes
        if nbytes:
            move_all(os.pwritev, self._fd, view_memory(data), offset, "boundary file")
        return _Ticket(offset, nbytes, tuple(tensor.size()), stride, tensor.dtype)

    def fetch(self, ticket: object) -> Tensor:
        """Reads a tensor back."""
        assert isinstance(ticket, _Ticket)
        rest = torch.empty_strided(ticket.size, ticket.stride, dtype=ticket.dtype)
        if ticket.nbytes:
            move_all(os.preadv, self._fd, view_memory(bytes_of(rest)), ticket.offset, "boundary file")
        return rest.to(self._device)

    def release(self, ticket: object) -> None:
        """Gives room back."""
        assert isinstance(ticket, _Ticket)
        self._free.setdefault(ticket.nbytes, []).append(ticket.offset)

    def close(self) -> None:
        """Removes the file."""
        if self._opened is not None:
            self._finalizer()
