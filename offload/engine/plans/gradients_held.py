"""Which gradients are in host memory between two steps: accumulated ones, and those of pending updates."""

from __future__ import annotations

from torch import Tensor

from offload.streaming.shard import Shard

__all__ = ["begins_with_gradients", "unowned_gradients"]


def unowned_gradients(shard: Shard) -> list[Tensor]:
    """The gradients of a shard that no pending update owns: accumulated ones, or zeros."""
    return [] if shard.pending is not None else [s.parameter.grad for s in shard.own if s.parameter.grad is not None]


def begins_with_gradients(shard: Shard) -> bool:
    """Whether gradients of a shard are in host memory, for the next backward or a pending update."""
    if not shard.blocking_io:  # those that rest there may be updated at any time
        return shard.pending is not None or bool(unowned_gradients(shard))
    jobs = () if shard.pending is None else shard.pending.tasks
    pending = [gradient for job in jobs for gradient in job.gradients if gradient is not None]
    in_file = shard.gradient_regions
    return any(
        gradient.is_sparse or not any(region.holds(gradient) for region in in_file)
        for gradient in (*unowned_gradients(shard), *pending)
    )
