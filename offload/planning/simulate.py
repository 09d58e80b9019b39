"""What a plan will cost, before it runs: it is run on clocks, one for compute and one for each lane.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.plan import Kind, Plan, validate

__all__ = ["Costs", "Forecast", "simulate"]


@dataclass(frozen=True)
class Costs:
    """What the actions of each shard cost, in seconds; of a cell for ``forward`` and ``backward``. Bytes of a slot."""

    load: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    drain: Sequence[float]
    slot_bytes: int
    update: Sequence[float] = ()


@dataclass(frozen=True)
class Forecast:
    """What :func:`simulate` predicts: seconds until compute and copies are done, seconds that compute waits, bytes."""

    seconds: float
    wait_seconds: float
    compute_seconds: float
    slot_bytes: int


def simulate(plan: Plan, costs: Costs) -> Forecast:
    """Runs a plan on clocks of its own for compute and for each lane, which meet only where the plan says."""
    validate(plan)
    compute = loading = draining = updating = waited = computed = 0.0
    arrival = dict.fromkeys(plan.resident, 0.0)
    home: dict[int, float] = {}  # when gradients are home
    updated: dict[int, float] = {}
    for action in plan.actions:
        shard = action.shard
        if action.kind is Kind.LOAD:
            loading = arrival[shard] = max(loading, compute, updated.get(shard, 0.0)) + costs.load[shard]
        elif action.kind is Kind.DRAIN:
            draining = home[shard] = max(draining, compute) + costs.drain[shard]
        elif action.kind is Kind.UPDATE:
            updating = updated[shard] = max(updating, compute, home.get(shard, 0.0)) + costs.update[shard]
        elif action.kind is not Kind.EVICT:
            start = max(compute, arrival[shard])
            seconds = (costs.forward if action.kind is Kind.FORWARD else costs.backward)[shard]
            waited += start - compute
            computed += seconds
            compute = start + seconds
    return Forecast(max(compute, loading, draining, updating), waited, computed, plan.slots * costs.slot_bytes)
