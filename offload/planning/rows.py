"""Counts the rows of micro-batches, and joins small chunks of a batch as far as the memory for activations allows.

Memory and time of a step grow with the elements of its input, and a batch of sequences is as long as the longest of
them. What is measured and planned for each row is for a row of the model's first batch; a row of twice as many elements
counts as two. So where all rows are alike, they are counted as they are.

A caller chooses chunks so small that a whole model's activations fit. Here only one shard's activations exist at a
time, so several chunks fit at once, and larger matrix products are faster. Outputs and gradients are split again, so
the caller sees its own chunks only.

Chunks are joined only if their tensors have equal dtypes and trailing shapes and all other values are equal, and never
where a layer is known to look across rows: batch normalisation in training.

Products of more rows round differently. So which chunks run together follows from shapes and from bytes that are given
or counted, never from times or from the memory of the process: it is the same in every step and process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from torch import Tensor, nn

from pipe.nested import flatten, tensors_in, unflatten
from pipe.torch_private.modules import BatchNorm

__all__ = [
    "RowUnits",
    "by_chunk",
    "kind_of",
    "largest_rows",
    "looks_across_rows",
    "remember",
    "rounded_up",
    "rows_in",
    "runs_together",
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


# --- chunks that run together -----------------------------------------------------------------------------------------


def looks_across_rows(layers: Sequence[nn.Module]) -> bool:
    """Whether a layer is known to compute a row from other rows, too."""
    return any(
        isinstance(module, BatchNorm) and (module.training or not module.track_running_stats)
        for layer in layers
        for module in layer.modules()
    )


def rows_in(chunk: Any) -> int | None:
    """Rows of a chunk's tensors if all have the same number, and may be joined; else None."""
    sizes = {x.size(0) if x.dim() and not x.is_sparse else -1 for x in tensors_in(chunk)}
    return sizes.pop() if len(sizes) == 1 and -1 not in sizes else None


def kind_of(chunk: Any) -> tuple[Any, ...]:
    """What chunks have in common that may be joined, or measured by one of them; its ``repr`` is a key."""
    leaves, spec = flatten(chunk)
    kinds = [
        (x.dtype, x.device, x.dim(), x.shape[1:], x.requires_grad) if isinstance(x, Tensor) else (type(x), x)
        for x in leaves
    ]
    return spec, kinds, rows_in(chunk) is None


def runs_together(chunks: Sequence[Any], most_rows: Callable[[Any], int]) -> list[list[int]]:
    """Adjacent chunks that may be joined and run together, as lists of their indices.

    A single chunk may have more rows than others together; one whose tensors differ in rows is not joined.
    ``most_rows``: of the first of several chunks that are alike, the most rows that may run together; 0: none do.
    """
    runs: list[list[int]] = []
    for _, alike in groupby(range(len(chunks)), key=lambda i: kind_of(chunks[i])):
        first, *others = alike
        runs.append([first])
        rows, most = rows_in(chunks[first]), 0
        if others and rows is not None:
            most = most_rows(chunks[first])
        for i in others:
            count = rows_in(chunks[i])
            if rows is not None and count is not None and rows + count <= most:
                runs[-1].append(i)
                rows += count
            else:
                runs.append([i])
                rows = count
    return runs


def by_chunk(output_fn: Callable[[Any], Any] | None, rows: Sequence[int]) -> Callable[[Any], list[Any]]:
    """A function that returns the outputs of the chunks in a group, which have so many rows, after ``output_fn``."""

    def outputs(output: Any) -> list[Any]:
        leaves, spec = flatten(output)
        columns: list[Sequence[Any]] = []
        for leaf in leaves:
            if len(rows) > 1 and isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.size(0) != sum(rows)):
                raise ValueError(
                    f"expected outputs with one row for each of the {sum(rows)} rows of {len(rows)} chunks that ran "
                    f"together, got shape {tuple(leaf.shape)}; pass MemoryPolicy(join_chunks=False) to keep chunks "
                    f"apart"
                )
            splits = len(rows) > 1 and isinstance(leaf, Tensor)
            columns.append(leaf.split(list(rows)) if splits else [leaf] * len(rows))
        found = [unflatten(list(row), spec) for row in zip(*columns, strict=True)]
        return found if output_fn is None else [*map(output_fn, found)]

    return outputs
