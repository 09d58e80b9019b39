"""From layers in ordinary memory to the engine that runs them from their homes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from offload.engine.executor import Executor
from offload.planning.budget import Layout
from offload.storage import Tier
from offload.streaming.lane import Lanes
from offload.streaming.materialize import Values
from offload.streaming.shard import make_shards
from offload.telemetry.statistics import Meter

__all__ = ["make_walk"]


def make_walk(
    layers: Mapping[str, nn.Module],
    cuts: Sequence[int],
    values: Mapping[Tensor, Values],
    *,
    layout: Layout,
    device: torch.device,
    tier: Tier,
    lanes: Lanes,
    meter: Meter,
    recompute: bool,
    graph_bytes: int,
    param_dtype: torch.dtype | None,
) -> Executor:
    """Moves parameters home and buffers to the compute device.

    Args:
        layers: by name.
        cuts: number of layers of each shard.
        values: what parameters and buffers are read from, if not from the layers.
        layout: slots, bytes for boundaries, and the budget that was asked for.
        device: where layers compute.
        tier: where homes are.
        lanes: for the copies of this model.
        meter: of the model.
        recompute: whether only what enters each shard is kept.
        graph_bytes: for graphs between forward and backward.
        param_dtype: of floating-point parameters in slots.
    """
    shards = make_shards(list(layers.items()), cuts, tier, param_dtype, values)
    for layer in layers.values():
        for module in layer.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(device)
    names = list(layers)
    return Executor(
        shards,
        [names[shard.first : shard.first + len(shard.layers)] for shard in shards],
        device=device,
        tier=tier,
        lanes=lanes,
        meter=meter,
        slots=layout.slots,
        boundary_bytes=layout.boundary_bytes,
        recompute=recompute,
        graph_bytes=graph_bytes,
        param_dtype=param_dtype,
        budget_bytes=layout.budget_bytes,
    )
