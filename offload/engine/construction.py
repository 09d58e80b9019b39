"""Builds the :class:`~offload.engine.executor.Executor` of a model from layers in ordinary memory."""

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

__all__ = ["make_executor"]


def make_executor(
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
    """Moves parameters to their homes and buffers to the compute device.

    Args:
        layers: by name.
        cuts: number of layers of each shard.
        values: sources of parameters and buffers that are not read from the layers.
        layout: slots, bytes for boundaries, and the memory budget.
        device: the compute device.
        tier: storage of the homes.
        lanes: for the copies of this model.
        meter: of the model.
        recompute: whether only the inputs of each shard are kept for backward.
        graph_bytes: for graphs kept between forward and backward.
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
