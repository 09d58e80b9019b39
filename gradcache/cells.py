"""Cells of the layered walk: one layer's work on one group of chunks, as the first pass leaves it to the second.

A cell either kept its graph, or knows how to be repeated: random state, buffers, and what entered it, if that was kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcache import grouping, representations
from gradcache.entering import Entering
from gradcache.layers import Layers, Profile
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.recompute.dead_code import DeadCode
from pipe.recompute.module_state import ModuleState
from pipe.recompute.replay import Replay

__all__ = ["Again", "Graph", "Group", "Kept", "Work", "nbytes_of"]


class Kept:
    """A value at rest: in host memory, whatever device it came from."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = flatten(value)
        self._devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._leaves = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def back(self) -> Any:
        """The value where it came from."""
        pairs = zip(self._leaves, self._devices, strict=True)
        return unflatten([x if device is None else x.to(device) for x, device in pairs], self._spec)


@dataclass
class Again:
    """How to repeat one layer's work on one group, and what entered it (None: not kept)."""

    replay: Replay
    module_state: ModuleState
    copies_input: bool
    kept: Kept | None
    dead_code: DeadCode | None

    def given(self, value: Any) -> Any:
        """What the layer meets: ``value``, or a copy of it where the layer writes over its input."""
        return map_tensors(torch.clone, value) if self.copies_input else value


@dataclass
class Graph:
    """One layer's work on one group that ran once and for all."""

    output: Any
    leaves: Any


@dataclass
class Group:
    """Chunks that run together, with the rows of each; cells from layer ``graphs_from`` on keep their graphs."""

    chunks: list[int]
    rows: list[int]
    graphs_from: int
    profile: Profile | None
    cells: list[Again | Graph] = field(default_factory=list)
    entered: Any = None

    def finds_all(self, first: int) -> bool:
        """Whether what entered each layer after the ``first`` that a backward reaches was kept."""
        cells = self.cells[max(first, 1) :]
        return all(isinstance(cell, Graph) or cell.kept is not None for cell in cells)


@dataclass
class Work:
    """What both passes over one step's chunks do with a cell.

    ``output_fn`` is a part of the last layer, applied to each chunk's output; ``first`` is the first layer that a
    backward has to reach, ``wants_input`` whether the chunks themselves take gradients.
    """

    model: Layers
    entering: Entering
    output_fn: Callable[[Any], Any] | None
    first: int
    wants_input: bool

    def apply(self, j: int, value: Any, group: Group) -> Any:
        """Layer ``j`` on a group; the last one's result is cut into chunks."""
        result = self.model.call(j, value)
        if j + 1 < len(self.model.layers):
            return result
        parts = grouping.cut(result, group.rows)
        return parts if self.output_fn is None else [self.output_fn(part) for part in parts]

    def leaves(self, j: int, value: Any) -> Any:
        """What enters layer ``j`` as leaves that collect gradients, where somebody wants them."""
        if j > self.first or (j == 0 and self.wants_input):
            return representations.as_leaves(value)
        return map_tensors(Tensor.detach, value)

    def entered(self, group: Group) -> Any:
        """What entered the first layer, made once for a backward."""
        if group.entered is None:
            group.entered = grouping.joined([self.entering.take(i) for i in group.chunks])
        return group.entered


def nbytes_of(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
