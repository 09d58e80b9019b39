"""All-gather of rows with gradients, for processes with different numbers of rows.

The processes first exchange their numbers of rows; shorter tensors are padded for the collective, and the padding is
removed afterwards. So a last batch that does not divide evenly needs no special treatment.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gradcache.autograd_node import Gradients, with_backward

__all__ = ["gather_own", "gather_rows", "rows_per_rank"]


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
