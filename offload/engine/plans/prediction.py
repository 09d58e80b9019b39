"""Plans and predicts a training step that did not run yet, from what a model has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from offload.engine.homes import ModelHomes
from offload.engine.plans.measured import step_model
from offload.planning.choose import plan_of, predict
from offload.planning.estimate import Estimate
from offload.planning.plan import Kind, Plan
from offload.planning.step_model import Choice, StepModel

__all__ = ["next_plan", "predict_step"]


def next_plan(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> Plan:
    """The plan of the next step from empty slots, on micro-batches of so many rows."""
    return plan_of(*_next_step(homes, rows, training=training))


def _next_step(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> tuple[StepModel, Choice]:
    steps, streamer, model = homes.steps, homes.streamer, step_model(homes, rows)
    updates = streamer.gradient_offload.optimizers.planned()
    if streamer.updates_at_once:
        updates["pending"] = frozenset()
    choice = Choice(
        streamer.slots,
        streamer.in_place(),
        steps.kept_cells(rows, model.first),
        # Without recomputation boundaries are kept by the graphs.
        steps.boundary_budget_bytes if homes.recompute else math.inf,
        frozenset(streamer.gradient_offload.waiting or ()),
    )
    return replace(model, updates=updates, first=model.first if training else model.shards), choice


def predict_step(homes: ModelHomes, rows: Sequence[float]) -> Estimate:
    """Predicts the next step, on micro-batches of so many rows."""
    shards, meter, tier = homes.shards, homes.meter, homes.tier
    seen = all(meter.backward_seconds_per_row(shard.index) for shard in shards if shard.trainable)
    model, choice = _next_step(homes, rows, training=True)
    if not seen or (len(choice.in_memory) < len(shards) and not meter.bytes_loaded):
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    predicted = predict(model, choice)
    stores = [
        sum(shard.gradient_types.nbytes(s) for s in shard.at_home if s.parameter.requires_grad) for shard in shards
    ]
    resting = homes.bytes_in_memory()
    at_home = [resting[shard.index] for shard in shards if shard.blocking_io == tier.blocking_io]
    kept = [resting[shard.index] for shard in shards if not shard.blocking_io]
    plan, peak = predicted.plan, predicted.peak
    return Estimate(
        *predicted.forecast,
        bytes_loaded=sum(model.loaded_bytes[j] for j in plan.loads),
        bytes_stored=sum(stores[a.shard] for a in plan.actions if a.kind is Kind.DRAIN),
        peak_bytes={
            "device": peak.device,
            tier.name: sum(each.weights + each.gradients for each in at_home) + peak.spilled,
            "staging": tier.staging_bytes + homes.steps.reserved_bytes,
        }
        | ({"memory": sum(each.total for each in kept)} if kept and tier.blocking_io else {}),
        activation_bytes=peak.activations,
        memory_bytes=peak.memory,
    )
