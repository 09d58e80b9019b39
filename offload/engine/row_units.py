"""Counts micro-batches in rows as long as those of the first one.

Memory and time of a step grow with the elements of its input, and a batch of sequences is as long as the longest of
them. What is measured and planned for each row is for a row of the model's first batch; a row of twice as many elements
counts as two. So where all rows are alike, they are counted as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offload.engine.raw_chunk import LazyInput

__all__ = ["RowUnits", "largest_rows", "rounded_up"]

#: Sizes are rounded up by less than one part in so many: for each there is a plan, which is searched when it comes.
ROUNDING = 8


class RowUnits:
    """The rows of one model."""

    def __init__(self) -> None:
        #: Kind of a first tensor -> rows and elements of the first batch of that kind.
        self._first: dict[tuple[bool, int, bool], tuple[int, int]] = {}
        #: Whether rows of other lengths have come.
        self.differ = False

    def count(self, leaves: Sequence[Any]) -> float:
        """Rows of a micro-batch, by the elements of its first tensor; its own rows where these are unknown."""
        rows = largest_rows(leaves)
        raw = [tensor for x in leaves if isinstance(x, LazyInput) for tensor in x.tensors]
        main = next((x for x in (*leaves, *raw) if isinstance(x, Tensor) and x.dim()), None)
        if main is None or not main.numel():
            return rows
        kind = bool(raw), main.dim(), main.is_floating_point()
        first_rows, first_elements = self._first.setdefault(kind, (rows, main.numel()))
        if first_rows * main.numel() == first_elements * rows:
            return rows
        self.differ = True
        return first_rows * main.numel() / first_elements


def largest_rows(leaves: Sequence[Any]) -> int:
    """Rows of a micro-batch: the largest dimension 0 of its tensors; 1 if there is none."""
    raw = (x.rows for x in leaves if isinstance(x, LazyInput))
    return max((*(x.size(0) for x in leaves if isinstance(x, Tensor) and x.dim()), *raw), default=1)


def rounded_up(units: float, rows: int) -> float:
    """The size for which a micro-batch of ``units`` is planned; exactly that where it has so many rows itself."""
    if units == rows:
        return units
    step: float = 2.0 ** (math.floor(math.log2(units)) + 1) / (2 * ROUNDING)
    return math.ceil(units / step) * step


def split(units: float, count: int) -> list[float]:
    """The sizes of the parts of a batch."""
    if not isinstance(units, int):
        return [units / count] * count
    return [units // count + (i < units % count) for i in range(count)]


def shown(units: float) -> str:
    """In words of a message."""
    return f"{units:.2f}".rstrip("0").rstrip(".")
