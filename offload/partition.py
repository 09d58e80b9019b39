"""Layers into shards: consecutive, none empty, balanced by the bytes that a visit has to load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import nn

__all__ = ["cut_layers", "layer_bytes"]


def layer_bytes(layers: Sequence[nn.Module]) -> list[int]:
    """Bytes of the parameters of each layer; a tied parameter counts in every layer that uses it."""
    return [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]


def cut_layers(sizes: Sequence[int], shards: int) -> list[int]:
    """Number of layers in each of ``shards`` shards, such that the largest shard is as small as can be.

    Exact, by dynamic programming over (layers, shards): O(shards x layers^2). Among equal cuts the later shards are the
    smaller ones.

    Args:
        sizes: bytes of each layer.
        shards: number of shards, from 1 to the number of layers.

    Raises:
        ValueError: if there are more shards than layers, or fewer than one.
    """
    count = len(sizes)
    if not 1 <= shards <= count:
        raise ValueError(
            f"expected from 1 to {count} slices for a model of {count} layers, got num_slices={shards}: a slice "
            f"holds at least one layer; pass num_slices={max(1, min(shards, count))}"
        )
    total = [0, *accumulate(sizes)]
    # best[k][n]: (bytes of the largest shard, where the last shard begins) for the first n layers in k shards.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for k in range(1, shards + 1):
        row: dict[int, tuple[int, int]] = {}
        for n in range(k, count - (shards - k) + 1):
            row[n] = min((max(best[k - 1][m][0], total[n] - total[m]), -m) for m in best[k - 1] if m < n)
        best.append({n: (size, -m) for n, (size, m) in row.items()})
    cuts: list[int] = []
    end = count
    for k in range(shards, 0, -1):
        begin = best[k][end][1]
        cuts.append(end - begin)
        end = begin
    return cuts[::-1]
