"""Counts the rows of micro-batches, and remembers what was found for sizes of batches.

Memory and time of a step grow with the elements of its input, and a batch of sequences is as long as the longest of
them. What is measured and planned for each row is for a row of the model's first batch; a row of twice as many elements
counts as two. So where all rows are alike, they are counted as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

__all__ = [
    "RowUnits",
    "largest_rows",
    "remember",
    "rounded_up",
    "shown",
    "split",
]

#: Sizes are rounded up by less than one part in so many: for each there is a plan, which is chosen when it comes.
ROUNDING = 8

#: Different sizes of batches of which something is remembered: their choices, and the bytes of their boundaries.
SIZES_REMEMBERED = 64


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def remember(table: dict[_Key, _Value], key: _Key, value: _Value, *, each: int = 1) -> _Value:
    """Records a value as the last one; forgets the first where batches have very many sizes, of ``each`` so many."""
    table.pop(key, None)
    table[key] = value
    if len(table) > SIZES_REMEMBERED * each:
        del table[next(iter(table))]
    return value


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


def split(rows: int, count: int) -> list[int]:
    """The rows of the parts of a batch."""
    return [rows // count + (i < rows % count) for i in range(count)]


def shown(units: float) -> str:
    """In words of a message."""
    return f"{units:.2f}".rstrip("0").rstrip(".")
