"""Predicts the time of a plan: simulates it with one clock for compute and one for each lane.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from offload.planning.plan import CELLS, Kind, Plan
from offload.planning.step_model import WRITES_IN_FLIGHT, Choice, Key, StepModel

__all__ = ["Forecast", "simulate"]


class Forecast(NamedTuple):
    """What :func:`simulate` predicts."""

    #: Until compute and all copies are done; of these, waiting for copies, and computing.
    seconds: float
    wait_seconds: float
    compute_seconds: float


def simulate(plan: Plan, model: StepModel, choice: Choice) -> Forecast:
    """Simulates a plan from empty slots. Compute and lanes run in parallel and wait only where the plan says."""
    seconds = model.seconds(choice)
    at_step = choice.in_memory | model.updated_at_step
    loading = filling = draining = updating = moving = reduced = computed = 0.0
    arrival: dict[int, float] = {}  # when shards are in their slots, and when gradients are home
    home: dict[int, float] = {}
    updated: dict[int, float] = {}
    leaving: deque[float] = deque([0.0] * WRITES_IN_FLIGHT)  # when boundaries are written
    back: dict[Key, float] = {}  # when boundaries are read back
    for kind, shard, _ in plan.actions:  # in place, in order, as soon as the optimizer steps
        if kind is Kind.UPDATE and shard in at_step:
            updating = updated[shard] = updating + seconds[kind][shard]
    # If nothing is loaded beside them, the optimizer's step waits for its updates.
    compute = updating if len(choice.in_memory) == model.shards else 0.0
    for kind, shard, microbatch in plan.actions:
        if kind in CELLS:
            there = updated.get(shard, 0.0) if shard in choice.in_memory else arrival[shard]
            if kind is Kind.BACKWARD:
                there = max(there, back.get((shard, microbatch or 0), 0.0))
            computed += seconds[kind][shard]
            compute = max(compute, there) + seconds[kind][shard]
        elif kind is Kind.LOAD:
            # Whether the update before it has left the weights in the slot.
            filled = model.updates_fill_slots and shard in updated and shard not in arrival and shard not in at_step
            begin = max(loading, compute, updated.get(shard, 0.0))
            loading = arrival[shard] = begin + (0.0 if filled else seconds[kind][shard])
        elif kind is Kind.DRAIN:
            compute = max(compute, reduced)
            if model.reduced_bytes:  # over ranks, before it is stored
                loading = reduced = max(loading, compute) + model.costs.reduce * model.reduced_bytes[shard]
            draining = home[shard] = max(draining, compute, reduced) + seconds[kind][shard]
        elif kind is Kind.UPDATE and shard not in at_step:
            if model.updates_fill_slots:  # while the update before this one runs
                filling = max(filling, compute) + seconds[Kind.LOAD][shard]
            updating = updated[shard] = max(updating, compute, filling) + seconds[kind][shard]
        elif kind is Kind.UPDATE_IN_BACKWARD:
            updating = updated[shard] = max(updating, compute, home[shard]) + seconds[kind][shard]
        elif kind is Kind.SPILL:
            compute = max(compute, leaving.popleft())
            moving = max(moving, compute) + seconds[kind][shard]
            leaving.append(moving)
        elif kind is Kind.PREFETCH:
            moving = back[shard, microbatch or 0] = max(moving, compute) + seconds[kind][shard]
    return Forecast(max(compute, loading, draining, updating, moving), compute - computed, computed)
