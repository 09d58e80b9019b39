"""Layers into shards: consecutive, none empty, balanced by the bytes that a visit has to load."""

from __future__ import annotations

from collections.abc import Sequence

from pipe.balance.blockpartition import solve

__all__ = ["SMALLEST_SHARD_BYTES", "aligned", "cut_layers", "merge_small_layers"]

#: Every parameter starts at a multiple of this, in homes and in slots: a cache line, and what vector kernels prefer.
ALIGNMENT_BYTES = 64
#: Where only a memory is given, smaller layers are merged: such a load costs more than its bytes.
SMALLEST_SHARD_BYTES = 1 << 20


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
