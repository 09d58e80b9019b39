"""All-gather of rows with gradients, and losses over all of them, for processes with different numbers of rows.

The processes first exchange their numbers of rows; shorter tensors are padded for the collective, and the padding is
removed afterwards. So a last batch that does not divide evenly needs no special treatment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradcache.autograd_node import Gradients, with_backward

__all__ = ["RowsOfAll", "gather_own", "gather_rows", "over_processes", "rows_per_rank"]


def rows_per_rank(*rows: int, device: torch.device, group: dist.ProcessGroup | None = None) -> list[tuple[int, ...]]:
    """The ``rows`` of every process, in rank order; one collective for all values."""
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    world = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(world, mine, group=group)
    return [tuple(int(n) for n in row.tolist()) for row in world]


def _gathered(tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    longest = max(rows)
    padded = tensor.contiguous()
    if tensor.size(0) < longest:
        padded = torch.cat([padded, padded.new_zeros(longest - tensor.size(0), *tensor.shape[1:])])
    world = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(world, padded, group=group)
    return [part[:n] for part, n in zip(world, rows, strict=True)]


def gather_own(tensor: Tensor, axis: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """All processes' tensors along ``axis``; only this process's part gets a gradient, with no communication."""
    moved = tensor.movedim(axis, 0) if tensor.dim() else tensor.reshape(1)
    rows = [n for (n,) in rows_per_rank(moved.size(0), device=moved.device, group=group)]
    parts = _gathered(moved.detach(), rows, group)
    parts[dist.get_rank(group)] = moved
    joined = torch.cat(parts)
    return joined.movedim(0, axis) if tensor.dim() else joined


def gather_rows(tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """All processes' ``rows`` of ``tensor``; the gradient of a row is the sum over the losses of all processes."""

    def backward(gradients: Gradients) -> Gradients:
        # Every process computed a part of every row's gradient: the sum of all parts is the gradient.
        (gradient,) = gradients
        assert gradient is not None
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=group)
        start = sum(rows[: dist.get_rank(group)])
        return [summed[start : start + rows[dist.get_rank(group)]].clone()]

    return with_backward([torch.cat(_gathered(tensor.detach(), rows, group))], [tensor], backward)[0]


def over_processes(mine: Tensor, count: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of every process's ``mine`` over ``count``, on every process.

    Its gradient is this process's, scaled so that the mean over processes is the gradient of the whole.
    """
    world = dist.get_world_size(group)
    loss = mine * (world / max(count, 1))
    value = loss.detach().clone()
    dist.all_reduce(value, group=group)
    # The difference is exactly zero; it adds this process's gradient to the big batch's value.
    return (value / world + (loss - loss.detach())).to(dtype)


class RowsOfAll:
    """The rows of a batch in columns: those of all processes if ``gathers`` and there are several, else this one's.

    Raises:
        ValueError: if the ``columns`` of this process, each (rows, width), differ in their rows.
    """

    def __init__(self, columns: Sequence[Tensor], gathers: bool) -> None:
        rows, device = columns[0].size(0), columns[0].device
        if any(column.size(0) != rows for column in columns):
            sizes = [column.size(0) for column in columns[1:]]
            raise ValueError(f"expected as many rows in each column as anchors, got {sizes} for {rows} anchors")
        self._gathers = gathers and dist.is_available() and dist.is_initialized()
        self._per_rank = [n for (n,) in rows_per_rank(rows, device=device)] if self._gathers else [rows]
        start = sum(self._per_rank[: dist.get_rank()]) if self._gathers else 0
        #: The numbers of this process's rows among all.
        self.own = torch.arange(start, start + rows, device=device)

    def gathered(self, column: Tensor) -> Tensor:
        """A column of all processes, as :func:`gather_rows` does."""
        return gather_rows(column, self._per_rank) if self._gathers else column

    def mean(self, mine: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean over all rows of a loss whose sum over this process's rows is ``mine``, in ``dtype``."""
        total = sum(self._per_rank)
        return over_processes(mine, total, dtype) if self._gathers else (mine / max(total, 1)).to(dtype)
