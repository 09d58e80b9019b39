"""Finds the least limit of memory with which a step works, for the error of one that does not.

Buffers of optimizers and of transfers are a part of the limit, so a step needs more with a larger one. What is named is
a fixed point: a model that is made with exactly these bytes, and run in the same way, works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.engine.homes import ModelHomes
from offload.engine.plans.row_units import shown
from offload.planning.budget import shown_bytes
from offload.planning.partition import smallest_shard
from offload.storage.buffer import has_own_memory

__all__ = ["least_limit", "too_little"]


def least_limit(needed: Callable[[int], int], limit: int) -> int:
    """The least number, not below ``limit``, that is no less than what is ``needed`` with it, which grows with it."""
    while (more := needed(limit)) > limit:
        limit = more
    return limit


def too_little(homes: ModelHomes, rows: Sequence[float], least: int, limit: int, margin: int) -> str:
    """Says that a step needs ``least`` bytes, of which ``margin`` by earlier steps, and has ``limit``; what to do."""
    steps, optimizers = homes.steps, homes.streamer.gradient_offload.optimizers
    on_host = not has_own_memory(homes.device)
    staging = homes.tier.staging_bytes if on_host else 0
    buffers = optimizers.buffer_bytes() if on_host else 0

    def needed(nbytes: int) -> int:
        if not on_host:
            return least
        reserved = optimizers.buffer_bytes(steps.spare_bytes(nbytes)) if buffers else 0
        return least + max(0, reserved - buffers) + max(0, -(-staging * nbytes // limit) - staging)

    works = least_limit(needed, max(least, limit))
    outside = homes.outside_bytes()
    parts = [
        (margin, "by which earlier steps exceeded their prediction"),
        (outside.begins + outside.gradients - outside.held, "for parameters in no shard, their gradients and states"),
    ]
    said = ", ".join(f"{shown_bytes(nbytes)} of them {what}" for nbytes, what in parts if nbytes)
    # With more memory, small layers would share a shard, which needs more.
    sizes = [shard.slot_bytes for shard in homes.shards]
    merges = len(sizes) > 1 and not homes.layers_apart and min(sizes) < smallest_shard(sum(sizes), works)
    cuts = f" and num_slices={len(homes.shards)}" if merges else ""
    differ = homes.row_units.differ
    as_long, or_shorter = (" as long as those of the first batch", " or shorter") if differ else ("", "")
    return (
        f"a step of micro-batches of {shown(max(rows))} rows{as_long} takes at least {shown_bytes(least)} on "
        f"{homes.device}, {shown_bytes(least - limit)} more than memory={shown_bytes(limit)}"
        + (f" ({said})" if said else "")
        + f"; memory={works}{cuts} works with it; pass more memory, fewer{or_shorter} rows, or more "
        f"micro-batches (num_microbatches)"
    )
