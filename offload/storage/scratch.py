"""Stores boundaries on disk, in an unlinked file, which the system removes however the process ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.storage.buffer import view_memory
from offload.storage.contract import Scratch, bytes_of
from offload.storage.transfer import move_all
from pipe.freed import WhenFreed

__all__ = ["DiskScratch"]


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
