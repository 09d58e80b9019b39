"""The use of host memory where layers compute on a device of its own and homes are files.

There, host memory holds no activations: shards rest in it as far as it reaches, the first ones of a forward first, and
gradients of the others wait there for their update. Loads then come from memory instead of files.
"""

from __future__ import annotations

from collections.abc import Iterator

from offload.engine.homes import ModelHomes, ShardBytes
from offload.streaming.shard import Shard

__all__ = ["bytes_left", "in_host_memory", "shards_that_fit"]


def in_host_memory(homes: ModelHomes) -> frozenset[int]:
    """The shards that rest in host memory although their homes are files."""
    return frozenset(shard.index for shard in homes.shards if _is_there(shard))


def bytes_left(homes: ModelHomes, host_bytes: int) -> int:
    """Of ``host_bytes``, those that shards in host memory and buffers of transfers and updates leave."""
    resting = (each.total for shard, each in _shards(homes) if _is_there(shard))
    return max(0, host_bytes - _buffer_bytes(homes) - sum(resting))


def shards_that_fit(homes: ModelHomes, host_bytes: int, resident_bytes: int | None) -> set[int]:
    """The shards that may rest in so much host memory, together in no more than ``resident_bytes``."""
    optimizers = homes.streamer.gradient_offload.optimizers
    left = host_bytes - _buffer_bytes(homes)
    left = left if resident_bytes is None else min(left, resident_bytes)
    found: set[int] = set()
    for shard, each in _shards(homes):
        # Before its first update, a shard's states have no size yet, and would come into memory with it.
        if (optimizers.awaits_states() and shard.trainable and shard.file is None) or shard.on_device:
            continue
        left -= each.total
        if left < 0:
            break
        found.add(shard.index)
    return found


def _is_there(shard: Shard) -> bool:
    return shard.file is not None and not shard.on_device


def _shards(homes: ModelHomes) -> Iterator[tuple[Shard, ShardBytes]]:
    return zip(homes.shards, homes.bytes_in_memory(), strict=True)


def _buffer_bytes(homes: ModelHomes) -> int:
    return homes.tier.staging_bytes + homes.streamer.gradient_offload.optimizers.buffer_bytes()
