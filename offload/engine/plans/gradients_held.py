"""Which gradients are in host memory between two steps: accumulated ones, and those of pending updates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from offload.streaming.shard import Shard

__all__ = ["accumulates_in_memory", "begins_with_gradients", "gradients_there", "unowned_gradients"]


def unowned_gradients(shard: Shard) -> list[Tensor]:
    """The gradients of a shard that no pending update owns: accumulated ones, or zeros."""
    return [] if shard.pending is not None else [s.parameter.grad for s in shard.own if s.parameter.grad is not None]


def accumulates_in_memory(shard: Shard) -> bool:
    """Whether such gradients are in host memory, where the next backward adds to them."""
    return any(_in_memory(gradient, shard) for gradient in unowned_gradients(shard))


def begins_with_gradients(shard: Shard) -> bool:
    """Whether a pending update has gradients in host memory. Shards that rest there may be updated at any time."""
    if not shard.blocking_io:
        return True
    jobs = () if shard.pending is None else shard.pending.tasks
    return any(_in_memory(gradient, shard) for job in jobs for gradient in job.gradients if gradient is not None)


def gradients_there(shards: Iterable[Shard]) -> dict[str, frozenset[int]]:
    """The shards whose gradients are in host memory: ``held`` and ``begins`` of :class:`.StepBytes`."""
    shards = list(shards)
    return {
        "held": frozenset(shard.index for shard in shards if accumulates_in_memory(shard)),
        "begins": frozenset(shard.index for shard in shards if begins_with_gradients(shard)),
    }


def _in_memory(gradient: Tensor, shard: Shard) -> bool:
    """Whether a gradient is not in the file of the shard's gradients."""
    if gradient.is_sparse or not shard.blocking_io:
        return True
    return not any(region.holds(gradient) for region in shard.gradient_regions)
