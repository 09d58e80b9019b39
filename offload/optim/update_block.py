"""Ranges of an optimizer's work: the slice of a file that holds a state, and the elements that are updated at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.storage import Block

__all__ = ["StateSlice", "UpdateBlock"]


@dataclass(frozen=True)
class StateSlice:
    """The location of a state tensor in its file."""

    block: Block
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self) -> Tensor:
        """The state as a tensor on its file, without a copy."""
        with torch.inference_mode(False):
            flat = self.block.tensor[self.offset : self.offset + self.nbytes].view(self.dtype)
            return flat.as_strided(self.shape, self.stride, flat.storage_offset())


@dataclass(frozen=True)
class UpdateBlock:
    """Elements ``[begin, end)`` of the only parameter of a param block; with ``end=None`` all of all its parameters."""

    begin: int = 0
    end: int | None = None

    def span(self, nbytes: int, itemsize: int) -> tuple[int, int]:
        """Offset and size of the block in bytes, within a tensor of ``nbytes``."""
        begin = self.begin * itemsize
        return begin, (nbytes if self.end is None else self.end * itemsize) - begin

    def shape(self, part: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """``part`` (flat, uint8) as a tensor: of the whole shape, or flat if it is only a part of one."""
        flat = part.view(dtype)
        return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset()) if self.end is None else flat
