"""Layers into shards: consecutive, none empty, balanced by the bytes that a visit has to load."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipe.balance.blockpartition import solve

__all__ = ["cut_layers", "layer_bytes"]


def layer_bytes(layers: Sequence[nn.Module]) -> list[int]:
    """Bytes of the parameters of each layer; a tied parameter counts in every layer that uses it."""
    return [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in layers]


def cut_layers(sizes: Sequence[int], shards: int) -> list[int]:
    """Number of layers in each of ``shards`` shards, such that the largest shard is as small as can be.

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
    return [len(block) for block in solve(sizes, shards)]
