"""Predicts a training step from what a model has measured: seconds of cells and copies, bytes of boundaries."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.engine.steps import Steps
from offload.planning.estimate import Estimate, HomeBytes, estimate_step
from offload.planning.peak_memory import StepBytes
from offload.planning.plan import Plan
from offload.planning.simulate import Costs
from offload.storage import Tier
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter

__all__ = ["predict_step"]


def predict_step(
    plan: Plan,
    rows: Sequence[int],
    steps: Steps,
    *,
    shards: Sequence[Shard],
    meter: Meter,
    tier: Tier,
    device: torch.device,
) -> Estimate:
    """Predicts a plan for micro-batches of so many ``rows``.

    Raises:
        RuntimeError: if no training step has been measured yet.
    """
    seen = all(meter.cell_seconds_per_row("B", shard.index) for shard in shards if shard.trainable)
    if not seen or not meter.bytes_loaded:
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    loads = [sum(s.nbytes for s in shard.at_home) for shard in shards]
    gradient_bytes = [sum(s.nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    each = {lane: meter.copy_seconds_per_byte(lane) for lane in ("load", "drain", "update", "boundary")}
    boundaries, mean_rows = steps.sizes(rows), sum(rows) / len(rows)
    own = [s for shard in shards for s in shard.own]
    on_host = device.type == "cpu"
    costs = Costs(
        load=[nbytes * each["load"] for nbytes in loads],
        forward=[meter.cell_seconds_per_row("F", shard.index) * mean_rows for shard in shards],
        backward=[meter.cell_seconds_per_row("B", shard.index) * mean_rows for shard in shards],
        drain=[nbytes * each["drain"] for nbytes in gradient_bytes],
        update=[nbytes * each["update"] for nbytes in gradient_bytes],
        boundary=[boundaries((j, 0)) * each["boundary"] for j in range(len(shards) + 1)],
    )
    sizes = StepBytes(
        slot_bytes=max(shard.slot_bytes for shard in shards),
        gradient_bytes=gradient_bytes,
        # In host memory a home takes gradients as they are.
        gradients_stay=on_host and not tier.blocking_io,
        rows=rows,
        boundaries=boundaries,
        gradients=steps.sizes(rows, gradients=True),
        memory_profiles=meter.memory_profiles,
        profiles_with_boundary=meter.keeping,
    )
    home = HomeBytes(
        tier=tier.name,
        loads=loads,
        weights=sum(s.nbytes for s in own),
        gradients=sum(s.nbytes for s in own if s.parameter.requires_grad),
        staging=tier.staging_bytes + steps.reserved_bytes,
    )
    return estimate_step(plan, costs, sizes, home, on_host=on_host)
