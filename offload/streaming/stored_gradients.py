"""Where stored gradients are: regions, each with places for the gradients of some parameters.

A shard makes one region, on demand, for all that it trains. What is thawed while gradients are stored gets another one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.partition import aligned
from offload.storage import Block, Tier
from offload.streaming.slices import Slice
from pipe.torch_private.tensors import storage_uses

__all__ = ["GradientRegion", "GradientTypes", "set_gradient"]


def set_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Sets ``.grad``, also to a gradient of another type than the parameter has at home."""
    if gradient is None or gradient.dtype == parameter.dtype:
        parameter.grad = gradient
        return
    data = parameter.data
    parameter.grad = None
    try:
        # torch compares types when a gradient is assigned, not later.
        parameter.data = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(parameter.shape)
        parameter.grad = gradient
    finally:
        parameter.data = data


@dataclass(frozen=True)
class GradientTypes:
    """The types in which gradients are stored: in that of their parameter, or rounded to one of fewer bytes.

    Rounded are gradients that one visit completes. A parameter that several layers use gets a gradient from each, and
    the sum would be rounded once more with each of them.
    """

    #: The type of rounded gradients.
    dtype: torch.dtype | None = None
    #: Whether later backwards may add to rounded gradients, which rounds the sum once more.
    accumulates: bool = False
    #: The parameters whose gradients are rounded, as layers use them and as they are stored; by their identity, since
    #: all references to parameters are counted.
    rounded: frozenset[int] = frozenset()

    def rounds(self, s: Slice) -> bool:
        """Whether the gradient of a parameter is rounded."""
        return id(s.parameter) in self.rounded

    def of(self, s: Slice) -> torch.dtype:
        """The type in which the gradient of a parameter is stored."""
        return self.dtype if self.dtype is not None and self.rounds(s) else s.full_dtype

    def nbytes(self, s: Slice) -> int:
        """The bytes of the stored gradient of a parameter."""
        return s.parameter.numel() * self.of(s).itemsize if self.rounds(s) else s.full_nbytes


@dataclass(eq=False)
class GradientRegion:
    """A block, and the offset in it of the gradient of each of some parameters."""

    block: Block
    #: Of these parameters; the slices of their shard, since all references to parameters are counted.
    slices: list[Slice]
    #: By identity of the parameter.
    offsets: dict[int, int]
    #: Their types.
    types: GradientTypes

    @classmethod
    def allocate(cls, tier: Tier, label: str, slices: Iterable[Slice], types: GradientTypes) -> GradientRegion:
        """A new region for the gradients of these parameters. Raises OSError if the storage is full."""
        placed, offsets, end = list(slices), {}, 0
        for s in placed:
            offsets[id(s.parameter)] = end
            end += aligned(types.nbytes(s))
        return cls(tier.allocate(end, label), placed, offsets, types)

    def view(self, s: Slice) -> Tensor:
        """The place of the gradient of a parameter."""
        return s.view_at(self.block.tensor, self.offsets[id(s.parameter)], self.types.of(s))

    def holds(self, gradient: Tensor | None) -> bool:
        """Whether a gradient is stored here."""
        if gradient is None:
            return False
        strided: Any = gradient.layout is torch.strided
        mine = self.block.tensor.untyped_storage().data_ptr()
        return bool(strided) and gradient.untyped_storage().data_ptr() == mine

    def stored(self) -> list[Slice]:
        """The parameters whose gradients are stored here."""
        return [s for s in self.slices if (gradient := s.parameter.grad) is not None and self.holds(gradient)]

    def in_use(self, stored: int) -> bool:
        """Whether other code than so many stored gradients refers to its memory: one from before, which lives on."""
        return storage_uses(self.block.tensor) > 1 + stored
