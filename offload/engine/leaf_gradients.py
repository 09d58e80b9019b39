"""Sums the gradients of the leaves of a model's own forward over the pieces of its graph, in one backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from offload.engine.layouts import fitting

__all__ = ["LeafBytes", "LeafGradients"]

#: By ``id`` of a leaf: the bytes of its gradient, and the pieces that made it or added to it.
LeafBytes = dict[int, tuple[int, set[int]]]


class LeafGradients:
    """The gradients of the leaves that one backward wants.

    Args:
        made: is filled in for the last backward.
    """

    def __init__(self, made: LeafBytes) -> None:
        self._made = made
        #: The leaves whose gradients are wanted.
        self.wanted: Sequence[Tensor] = ()
        self._gradients: dict[Tensor, Tensor] = {}
        self._owned: set[Tensor] = set()
        self._added_to: set[Tensor] = set()

    def begin(self, wanted: Sequence[Tensor], added_to: Collection[Tensor] = ()) -> None:
        """Begins a backward; leaves in ``added_to`` are known to get several gradients."""
        self.wanted, self._added_to = wanted, set(added_to)
        self._gradients, self._owned = {}, set()
        self._made.clear()

    def add(self, leaf: Tensor, gradient: Tensor, piece: int) -> None:
        """Adds the gradient that a piece has made."""
        known = self._gradients.get(leaf)
        self._made.setdefault(id(leaf), (gradient.numel() * gradient.element_size(), set()))[1].add(piece)
        if known is None:
            # It may be memory of another tensor. The sum of two would be a third one at the same time.
            own = leaf in self._added_to and _is_plain(gradient)
            self._gradients[leaf] = gradient.clone() if own else gradient
        elif leaf in self._owned:
            known.add_(gradient)
            return
        else:
            self._gradients[leaf] = known + gradient
            own = _is_plain(gradient)
        if own:
            self._owned.add(leaf)

    def take(self) -> dict[Tensor, Tensor]:
        """All of them, at the end of the backward."""
        gradients, self._gradients = self._gradients, {}
        return {leaf: fitting(gradient, leaf) for leaf, gradient in gradients.items()}

    def clear(self) -> None:
        """Frees them."""
        self._gradients = {}


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not gradient.is_nested
