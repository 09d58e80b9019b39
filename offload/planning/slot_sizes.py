"""Sizes of slots for shards of different bytes: equal slots, and buffers of their own for shards that are much larger.

::

    shards        E   b   b   b   b   E        two equal slots of E bytes:            2 E
    slots         b   b                        two of b bytes, and one of E bytes
    beside them   E ----------------> E        while such a shard is loaded:          2 b + E

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

__all__ = ["slot_sizes", "slots_in_use"]


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


def slots_in_use(
    sizes: Sequence[int], slots: int, *, in_memory: frozenset[int] = frozenset(), apart: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Bytes of slots and own buffers while each shard computes, forward and backward: see :func:`slot_sizes`."""
    return _slots_in_use(tuple(sizes), slots, in_memory, apart)


@lru_cache(maxsize=256)
def _slots_in_use(
    sizes: tuple[int, ...], slots: int, in_memory: frozenset[int], apart: bool
) -> tuple[Sequence[int], Sequence[int]]:
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
