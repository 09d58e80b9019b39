"""Micro-batches: a batch cut along dimension 0, and put together again.

Every tensor with a dimension 0 is cut; scalars, 0-dimensional tensors and other objects go to every micro-batch as
they are. Two tensors that disagree about the number of rows are an error: rows are never dropped in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipe.nested import flatten, unflatten

__all__ = ["gather_nested", "rows_of", "split_nested"]


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def rows_of(value: Any) -> int:
    """Size of dimension 0 that all tensors of a nested value share; 1 where there is none.

    Raises:
        ValueError: if tensors differ in their size of dimension 0.
    """
    sizes = {leaf.size(0) for leaf in flatten(value)[0] if _is_split(leaf)}
    if len(sizes) > 1:
        raise ValueError(
            f"expected tensors with the same number of rows to cut into micro-batches, got sizes of dimension 0 "
            f"{sorted(sizes)}; pass tensors of equal dimension 0"
        )
    return sizes.pop() if sizes else 1


def split_nested(value: Any, chunks: int) -> list[Any]:
    """Cuts a nested value into at most ``chunks`` micro-batches of nearly equal size (views, never copies).

    With fewer rows than ``chunks`` there are as many micro-batches as rows. The first ones are the larger ones.

    Raises:
        ValueError: if ``chunks`` is not positive, or tensors differ in their size of dimension 0.
    """
    if chunks < 1:
        raise ValueError(f"expected at least 1 micro-batch, got chunks={chunks}")
    leaves, spec = flatten(value)
    count = min(chunks, max(rows_of(value), 1))
    if count == 1:
        return [value]
    columns = [torch.tensor_split(leaf, count) if _is_split(leaf) else (leaf,) * count for leaf in leaves]
    return [unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def gather_nested(values: list[Any]) -> Any:
    """Concatenates the outputs of micro-batches along dimension 0: the inverse of :func:`split_nested`.

    Leaves that are not tensors must be equal in all micro-batches.

    Raises:
        ValueError: if structures differ, or an output cannot be concatenated (0-dimensional, or unequal objects).
    """
    if len(values) == 1:
        return values[0]
    flat = [flatten(value) for value in values]
    spec = flat[0][1]
    for i, (_, other) in enumerate(flat):
        if other != spec:
            raise ValueError(f"micro-batch {i} returned another structure than micro-batch 0: {other}, not {spec}")
    gathered: list[Any] = []
    for k, column in enumerate(zip(*(leaves for leaves, _ in flat), strict=True)):
        first = column[0]
        if not isinstance(first, Tensor):
            if any(leaf is not first and leaf != first for leaf in column):
                raise ValueError(f"output leaf {k} is a {type(first).__name__} that differs between micro-batches")
            gathered.append(first)
        elif first.dim() == 0:
            raise ValueError(
                f"output leaf {k} is 0-dimensional and cannot be concatenated over {len(values)} micro-batches; "
                f"return one value per row, or use a single micro-batch"
            )
        else:
            gathered.append(torch.cat(column))
    return unflatten(gathered, spec)
