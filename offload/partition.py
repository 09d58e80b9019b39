"""Layers into shards: consecutive, none empty, balanced by the bytes that a visit has to load. And shards into slots.

Slots are equal, and shards that are much larger than others have buffers of their own::

    shards        E   b   b   b   b   E        two equal slots of E bytes:            2 E
    slots         b   b                        two of b bytes, and one of E bytes
    beside them   E ----------------> E        while such a shard is loaded:          2 b + E
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from pipe.balance.blockpartition import solve

__all__ = ["aligned", "cut_layers", "cut_within", "slot_sizes", "slots_in_use"]

#: Every parameter starts at a multiple of this, in homes and in slots: a cache line, and what vector kernels prefer.
ALIGNMENT_BYTES = 64
#: Where only a memory is given, smaller layers are merged: such a load costs more than its bytes.
SMALLEST_SHARD_BYTES = 1 << 20
#: So are layers below this part of the memory, and of the model. Each shard takes some time besides that of its layers:
#: 48 shards of 1 MiB took 1.12 to 1.15 of the processor's time of 12. Few shards leave little to choose from.
SHARDS_IN_MEMORY = 16


def aligned(nbytes: int) -> int:
    """Bytes that a parameter takes in a block."""
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def cut_layers(sizes: Sequence[int], shards: int) -> list[int]:
    """Number of layers in each of ``shards`` shards, with the largest shard as small as possible."""
    count = len(sizes)
    if not 1 <= shards <= count:
        raise ValueError(
            f"expected from 1 to {count} slices for a model of {count} layers, got num_slices={shards}: a slice "
            f"holds at least one layer; pass num_slices={max(1, min(shards, count))}"
        )
    return [len(block) for block in solve(sizes, shards)]


def cut_within(sizes: Sequence[int], limit_bytes: int | None) -> list[int]:
    """Number of layers in each shard, for a memory of so many bytes; None for one that is measured later.

    A layer that is large enough is a shard with the small ones before it. If all together have less, there is one
    shard; small layers at the end belong to the last.
    """
    in_memory = sum(sizes) if limit_bytes is None else min(sum(sizes), limit_bytes)
    least = max(SMALLEST_SHARD_BYTES, in_memory // SHARDS_IN_MEMORY)
    cuts, layers, nbytes = list[int](), 0, 0
    for size in sizes:
        layers += 1
        nbytes += size
        if nbytes >= least:
            cuts.append(layers)
            layers, nbytes = 0, 0
    if not cuts:
        return [layers]
    cuts[-1] += layers
    return cuts


def slot_sizes(
    sizes: Sequence[int], slots: int, *, in_memory: frozenset[int] = frozenset(), apart: bool
) -> tuple[int, Mapping[int, int]]:
    """Bytes of a slot, and those of each shard that gets a buffer of its own while it is loaded.

    Args:
        sizes: bytes of each shard in a slot.
        slots: their number. Shards are loaded in order, so as many consecutive ones are there at a time.
        in_memory: shards that need no slot.
        apart: whether shards may have buffers of their own; else all slots are as large as the largest shard.
    """
    loaded = [nbytes for j, nbytes in enumerate(sizes) if j not in in_memory]
    chosen = max(loaded, default=0)
    least = slots * chosen
    for size in sorted({*loaded} - {chosen}, reverse=True) if apart else ():
        own = [nbytes if nbytes > size else 0 for nbytes in loaded]
        most = max(sum(own[k : k + slots]) for k in range(len(own)))
        if slots * size + most < least:
            chosen, least = size, slots * size + most
    return chosen, {j: nbytes for j, nbytes in enumerate(sizes) if nbytes > chosen and j not in in_memory}


@lru_cache(maxsize=256)
def slots_in_use(
    sizes: tuple[int, ...], slots: int, *, in_memory: frozenset[int], apart: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Bytes of slots and own buffers while each shard computes, forward and backward: see :func:`slot_sizes`."""
    slot, own = slot_sizes(sizes, slots, in_memory=in_memory, apart=apart)
    streamed = [j for j in range(len(sizes)) if j not in in_memory]
    forward, backward, at = [], [], 0
    for j in range(len(sizes)):
        # Loads run ahead of use: those that follow are there, too.
        ahead = streamed[min(at, max(0, len(streamed) - slots)) :][:slots]
        at += j not in in_memory
        behind = streamed[max(0, at - slots) : max(slots, at)]
        forward.append(slots * slot + sum(own.get(k, 0) for k in ahead))
        backward.append(slots * slot + sum(own.get(k, 0) for k in behind))
    return forward, backward
