"""Counts rows and bytes of what enters blocks.

Memory and time of a step grow with the elements of its input, and a batch of sequences is as long as the longest of
them. What is measured and planned for each row is for a row of the model's first batch; a row of twice as many elements
counts as two. So where all rows are alike, they are counted as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipe.nested import tensors_in

__all__ = ["RowUnits", "bytes_of_boundary", "is_plain", "largest_rows", "rounded_up"]

#: Sizes are rounded up by less than one part in so many: for each there is a plan, which is chosen when it comes.
ROUNDING = 8


class RowUnits:
    """The rows of one model."""

    def __init__(self) -> None:
        #: Kind of a tensor -> rows and elements of the first batch that had one.
        self._first: dict[tuple[int, int, bool], tuple[int, int]] = {}
        #: Whether rows of other lengths have come.
        self.differ = False

    def count(self, leaves: Sequence[Any]) -> float:
        """Rows of a micro-batch, by the elements of its tensors; its own rows where these are unknown.

        Those of the first tensor, as of the tokens of a model, or of the first that has as many rows as any, and more
        than one element in each: labels, or a table or positions that all rows share, may come before it.
        """
        rows = largest_rows(leaves)
        tensors = [x for x in leaves if isinstance(x, Tensor) and x.dim() and x.numel()]
        counts: list[float] = []
        of_rows = sorted((x for x in tensors if x.size(0) == rows), key=lambda x: x.numel() == rows)
        for which, tensor in enumerate((*tensors[:1], *of_rows[:1])):
            kind = which, tensor.dim(), tensor.is_floating_point()
            first_rows, elements = self._first.setdefault(kind, (rows, tensor.numel()))
            alike = first_rows * tensor.numel() == elements * rows
            counts.append(rows if alike else first_rows * tensor.numel() / elements)
        units = max(counts, default=rows)
        self.differ |= units != rows
        return units


def largest_rows(leaves: Sequence[Any]) -> int:
    """Rows of a micro-batch: the largest dimension 0 of its tensors; 1 if there is none."""
    return max((x.size(0) for x in leaves if isinstance(x, Tensor) and x.dim()), default=1)


def rounded_up(units: float, rows: int) -> float:
    """The size for which a micro-batch of ``units`` is planned; exactly that where it has so many rows itself."""
    if units == rows:
        return units
    step: float = 2.0 ** (math.floor(math.log2(units)) + 1) / (2 * ROUNDING)
    return math.ceil(units / step) * step


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided and of no subclass, so that it can leave memory; others stay."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def bytes_of_boundary(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse or nested one, those stored, with their indices."""
    if tensor.layout in (torch.strided, torch.jagged):
        return int(tensor.numel()) * tensor.element_size()
    pickled = tensor.detach().__reduce_ex__(2)  # has values and indices, whatever their names in this layout
    return sum(part.numel() * part.element_size() for part in tensors_in(pickled))
