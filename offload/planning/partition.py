"""Layers into shards: consecutive, none empty, balanced by the bytes that a visit has to load."""

from __future__ import annotations

from collections.abc import Sequence

from pipe.balance.blockpartition import solve

__all__ = ["aligned", "cut_layers", "cut_within", "merge_small_layers", "smallest_shard"]

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
    """Number of layers in each shard, for a memory of so many bytes; None for one that is measured later."""
    return merge_small_layers(sizes, smallest_shard(sum(sizes), limit_bytes))


def smallest_shard(nbytes: int, limit_bytes: int | None) -> int:
    """Bytes of layers that are a shard by themselves, in a model of so many bytes and a memory as above."""
    least = nbytes if limit_bytes is None else min(nbytes, limit_bytes)
    return max(SMALLEST_SHARD_BYTES, least // SHARDS_IN_MEMORY)


def merge_small_layers(sizes: Sequence[int], least: int) -> list[int]:
    """Number of layers in each shard of the finest cut whose shards have at least ``least`` bytes.

    A layer that is large enough is a shard with the small ones before it. If all together have less, there is one
    shard; small layers at the end belong to the last.
    """
    cuts, layers, nbytes = [], 0, 0
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
