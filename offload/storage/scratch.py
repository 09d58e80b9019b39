"""Stores boundaries on disk, in unlinked files, which the system removes however the process ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.storage.buffer import view_memory
from offload.storage.contract import Scratch, bytes_of
from offload.storage.stripes import Extent, Stripes
from offload.storage.transfer import Transfers, move_all
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
    """Boundaries in one unlinked file of each folder, over which their bytes are dealt."""

    def __init__(
        self, name: str, folders: Sequence[Path], folder_owner: object, device: torch.device, transfers: Transfers
    ) -> None:
        self.name = name
        self._folders = folders
        self._folder_owner = folder_owner  # keeps the folders until the files are open
        self._device = device
        self._transfers = transfers
        self._stripes = Stripes(len(folders))
        self._opened: list[int] = []
        self._file_bytes = 0
        self._free: dict[int, list[int]] = {}

    def _open(self) -> None:
        """Opens the files, at first use: most steps keep their boundaries in memory."""
        opened: list[int] = []
        finalizer = WhenFreed(partial(_close, opened))
        try:
            for folder in self._folders:
                fd, path = tempfile.mkstemp(prefix="boundaries-", dir=folder)
                opened.append(fd)
                os.unlink(path)
        except BaseException:
            finalizer()
            raise
        self._opened, self._finalizer = opened, finalizer

    def _move(self, call: Callable[..., int], data: Tensor, offset: int) -> None:
        if not self._opened:
            self._open()
        memory = view_memory(data)

        def move(extent: Extent) -> None:
            part = memory[extent.begin - offset : extent.end - offset]
            # Boundaries of a single directory name none: there is no other.
            what = f"boundary file in {self._folders[extent.file].parent}" if len(self._opened) > 1 else "boundary file"
            move_all(call, self._opened[extent.file], part, extent.begin + extent.shift, what)

        extents = list(self._stripes.extents(offset, offset + data.numel()))
        if len(extents) == 1:
            move(extents[0])
        else:
            self._transfers.map_parallel(move, extents)

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
        """Removes the files."""
        if self._opened:
            self._finalizer()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
