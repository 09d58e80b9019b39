"""Where the graph of a cell begins: the node that takes the boundary's gradients out of autograd.

A plain leaf would do almost the same, but autograd stores a leaf's gradient in the leaf's own layout. That is a copy,
and the layer before would sum a gradient of another layout than it gets in the bare model, in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipe.phony import get_phony

__all__ = ["Source"]


class Source:
    """The beginning of one cell's graph.

    Args:
        leaves: the flat boundary.
        requires: which of the leaves need a gradient.
    """

    def __init__(self, leaves: Sequence[Any], requires: Sequence[bool]) -> None:
        # A tensor that stands at several places is one tensor in the cell as well, with one gradient.
        first: dict[int, int] = {}
        same_as = [first.setdefault(id(x), k) if isinstance(x, Tensor) else k for k, x in enumerate(leaves)]
        self._positions = [k for k, wanted in enumerate(requires) if wanted and same_as[k] == k]
        self._gradients: tuple[Tensor | None, ...] = (None,) * len(self._positions)
        #: The boundary, as the cell's graph sees it.
        self.leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        if self._positions:
            tensors = [self.leaves[k] for k in self._positions]
            with torch.enable_grad():
                phony = get_phony(tensors[0].device, requires_grad=True)
                results = _Begin.apply(self, phony, *tensors)  # type: ignore[no-untyped-call]
            for k, result in zip(self._positions, results, strict=True):
                self.leaves[k] = result
        self.leaves = [self.leaves[k] for k in same_as]

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors that need a gradient."""
        return [self.leaves[k] for k in self._positions]

    def take(self, gradients: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """One gradient or None for each leaf: those that arrived here, or ``gradients`` of the wanted ones."""
        arrived = self._gradients if gradients is None else gradients
        self._gradients = (None,) * len(self._positions)
        back: list[Tensor | None] = [None] * len(self.leaves)
        for k, gradient in zip(self._positions, arrived, strict=True):
            back[k] = gradient
        return back

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Called by autograd, once the gradients of all tensors are complete."""
        self._gradients = gradients


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Source, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Without a weak reference, the source holds its graph and the graph its source, until garbage is collected.
        ctx.source = weakref.ref(source)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        source = ctx.source()
        if source is not None:  # else nobody asks for them
            source.arrive(gradients)
        return (None,) * (2 + len(gradients))
