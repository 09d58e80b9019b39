"""Plans and predicts a training step that did not run yet, from what a model has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.engine.homes import ModelHomes
from offload.planner.measured import step_model
from offload.planning.budget import shown_record
from offload.planning.choose import predict
from offload.planning.plan import Kind, Plan
from offload.planning.planner import plan_step
from offload.planning.step_model import Choice, StepModel

__all__ = ["Estimate", "next_plan", "predict_step"]


@dataclass(frozen=True)
class Estimate:
    """Prediction for one step, forward and backward; ``print()`` shows it as a table."""

    #: Seconds from the first load to the last gradient at home, without the user's loss; with the updates of an
    #: ``OffloadOptimizer``, without any other optimizer.
    seconds: float
    #: Of these, seconds in which compute waits for a copy.
    wait_seconds: float
    #: Seconds inside layers.
    compute_seconds: float
    #: Bytes that the step reads from homes, and bytes of gradients that it writes there.
    bytes_loaded: int
    bytes_stored: int
    #: At home: parameters, gradients, and boundaries that are written out.
    home_bytes: int
    #: The most bytes at one time in the memory that layers compute in: slots, boundaries, activations and all else;
    #: where that is host memory, homes in host memory with their optimizer states included.
    memory_bytes: int

    def __str__(self) -> str:
        return shown_record(self)


def next_plan(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> Plan:
    """The plan of the next step from empty slots, on micro-batches of so many rows."""
    return plan_step(*_next_step(homes, rows, training=training))


def _next_step(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> tuple[StepModel, Choice]:
    steps, streamer, model = homes.steps, homes.streamer, step_model(homes, rows)
    updates = model.updates._replace(pending=frozenset()) if streamer.updates_at_once else model.updates
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
    shards, meter = homes.shards, homes.meter
    seen = all(meter.backward_seconds_per_row(shard.index) for shard in shards if shard.trainable)
    model, choice = _next_step(homes, rows, training=True)
    if not seen or (len(choice.in_memory) < len(shards) and not meter.bytes_loaded):
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    predicted, each = predict(model, choice), homes.bytes_in_memory()
    stored = [
        sum(shard.gradient_types.nbytes(s) for s in shard.at_home if s.parameter.requires_grad) for shard in shards
    ]
    at_home = [each[shard.index] for shard in shards if shard.blocking_io == homes.tier.blocking_io]
    return Estimate(
        *predicted.forecast,
        bytes_loaded=sum(model.loaded_bytes[j] for j in predicted.plan.loads),
        bytes_stored=sum(stored[a.shard] for a in predicted.plan.actions if a.kind is Kind.DRAIN),
        home_bytes=sum(there.weights + there.gradients for there in at_home) + predicted.peak.spilled,
        memory_bytes=predicted.peak.memory,
    )
