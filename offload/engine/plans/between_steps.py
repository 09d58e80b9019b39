"""What is in host memory between two steps: shards, gradients, and states of optimizers that are not ours.

Where layers compute on a device of its own and homes are files, host memory holds no activations: shards rest in it as
far as it reaches, the first ones of a forward first, and gradients of the others wait there for their update. Loads
then come from memory instead of files.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from offload.engine.homes import ModelHomes
from offload.streaming.shard import Shard

__all__ = [
    "bytes_left",
    "holds_gradients",
    "in_host_memory",
    "shards_that_fit",
    "states_of_others",
    "unowned_gradients",
]


def in_host_memory(homes: ModelHomes) -> frozenset[int]:
    """The shards that rest in host memory although their homes are files."""
    return frozenset(shard.index for shard in homes.shards if shard.file is not None and not shard.on_device)


def bytes_left(homes: ModelHomes, host_bytes: int) -> int:
    """Of ``host_bytes``, those that shards in host memory and buffers of transfers and updates leave."""
    each = homes.bytes_in_memory()
    return max(0, host_bytes - _buffer_bytes(homes) - sum(each[j].total for j in in_host_memory(homes)))


def shards_that_fit(homes: ModelHomes, host_bytes: int, resident_bytes: int | None) -> set[int]:
    """The shards that may rest in so much host memory, together in no more than ``resident_bytes``."""
    awaits = homes.streamer.gradient_offload.optimizers.awaits_states()
    left = host_bytes - _buffer_bytes(homes)
    left = left if resident_bytes is None else min(left, resident_bytes)
    found: set[int] = set()
    for shard, each in zip(homes.shards, homes.bytes_in_memory(), strict=True):
        # Before its first update, a shard's states have no size yet, and would come into memory with it.
        if (awaits and shard.trainable and shard.file is None) or shard.on_device:
            continue
        left -= each.total
        if left < 0:
            break
        found.add(shard.index)
    return found


def _buffer_bytes(homes: ModelHomes) -> int:
    return homes.tier.staging_bytes + homes.streamer.gradient_offload.optimizers.buffer_bytes()


def unowned_gradients(shard: Shard) -> list[Tensor]:
    """The gradients of a shard that no pending update owns: accumulated ones, or zeros."""
    return [] if shard.pending is not None else [s.parameter.grad for s in shard.own if s.parameter.grad is not None]


def holds_gradients(shard: Shard) -> bool:
    """Whether gradients of a shard are in host memory, for the next backward or a pending update."""
    if not shard.blocking_io:  # those that rest there may be updated at any time
        return shard.pending is not None or bool(unowned_gradients(shard))
    jobs = () if shard.pending is None else shard.pending.tasks
    pending = [gradient for job in jobs for gradient in job.gradients if gradient is not None]
    return any(
        gradient.is_sparse or not any(region.holds(gradient) for region in shard.gradient_regions)
        for gradient in (*unowned_gradients(shard), *pending)
    )


def states_of_others(shards: Collection[Shard]) -> Iterator[tuple[str, int]]:
    """The class and the bytes of the states of each optimizer that was not made for a model in shards.

    torch keeps no list of its optimizers, and a hook would run in every step of each.
    """
    ours = {id(there.parameter) for shard in shards for there in shard.at_home}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):  # a proxy whose object has ended has no ``__class__``
            states = [state for p, state in found.state.items() if id(p) in ours]
            nbytes = sum(x.untyped_storage().nbytes() for s in states for x in s.values() if isinstance(x, Tensor))
            if nbytes:
                yield type(found).__name__, nbytes
