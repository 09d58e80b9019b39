"""Predicts a training step from what a model has measured."""

from __future__ import annotations

from collections.abc import Sequence

from offload.engine.homes import ModelHomes
from offload.engine.plans.measured import step_model
from offload.planning.estimate import Estimate
from offload.planning.plan import Kind, Plan
from offload.planning.step_model import predict_plan

__all__ = ["predict_step"]


def predict_step(plan: Plan, rows: Sequence[float], homes: ModelHomes) -> Estimate:
    """Predicts a plan for micro-batches of so many ``rows``."""
    shards, meter, tier = homes.shards, homes.meter, homes.tier
    seen = all(meter.backward_seconds_per_row(shard.index) for shard in shards if shard.trainable)
    if not seen or (plan.loads and not meter.bytes_loaded):
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    model = step_model(homes, rows)
    forecast, peak = predict_plan(model, plan)
    stores = [
        sum(shard.gradient_types.nbytes(s) for s in shard.at_home if s.parameter.requires_grad) for shard in shards
    ]
    resting = homes.bytes_in_memory()
    at_home = [resting[shard.index] for shard in shards if shard.blocking_io == tier.blocking_io]
    kept = [resting[shard.index] for shard in shards if not shard.blocking_io]
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(model.loaded_bytes[j] for j in plan.loads),
        bytes_stored=sum(stores[a.shard] for a in plan.actions if a.kind is Kind.DRAIN),
        peak_bytes={
            "device": peak.device_bytes,
            tier.name: sum(each.weights + each.gradients for each in at_home) + peak.spilled_bytes,
            "staging": tier.staging_bytes + homes.steps.reserved_bytes,
        }
        | ({"memory": sum(each.total for each in kept)} if kept and tier.blocking_io else {}),
        activation_bytes=peak.activation_bytes,
        memory_bytes=peak.memory_bytes,
    )
