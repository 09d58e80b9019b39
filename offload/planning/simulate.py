"""Predicts the time of a plan: simulates it with one clock for compute and one for each lane.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from offload.planning.plan import CELLS, Kind, Plan
from offload.planning.residency import WRITES_IN_FLIGHT
from offload.planning.step_model import Choice, Costs

__all__ = ["Forecast", "simulate"]


class Forecast(NamedTuple):
    """What :func:`simulate` predicts."""

    #: Until compute and all copies are done; of these, waiting for copies, and computing.
    seconds: float
    wait_seconds: float
    compute_seconds: float


def simulate(plan: Plan, costs: Costs, choice: Choice) -> Forecast:
    """Simulates a plan from empty slots. Compute and lanes run in parallel and wait only where the plan says."""
    seconds = costs.of(choice)
    at_step = choice.in_memory | costs.updated_at_step
    loading = filling = draining = moving = computed = 0.0
    arrival: dict[int, float] = {}  # when shards are in their slots, and when gradients are home
    home: dict[int, float] = {}
    updated: dict[int, float] = {}
    leaving: deque[float] = deque([0.0] * WRITES_IN_FLIGHT)  # when boundaries are written
    back: dict[tuple[int, int | None], float] = {}  # when boundaries are read back
    reduced = 0.0  # with several ranks: when the gradients before can be stored
    filled: set[int] = set()  # slots that the update before a load has filled
    empty = plan.slots
    held: dict[int, float] = {}  # when updates in backward end that write to the slot of their shard
    in_slots: deque[float] = deque()  # the same of shards that were evicted meanwhile
    updating = _update_at_step(plan, at_step, seconds[Kind.UPDATE], updated)
    # If nothing is loaded beside them, the optimizer's step waits for its updates.
    compute = updating if len(choice.in_memory) == len(costs.load) else 0.0
    for kind, shard, microbatch in plan.actions:
        if kind in CELLS:
            there = updated.get(shard, 0.0) if shard in choice.in_memory else arrival[shard]
            if kind is Kind.BACKWARD:
                there = max(there, back.get((shard, microbatch), 0.0))
            computed += seconds[kind][shard]
            compute = max(compute, there) + seconds[kind][shard]
        elif kind is Kind.LOAD:
            begin = max(loading, compute, updated.get(shard, 0.0))
            if empty <= 0 and in_slots:
                begin = max(begin, in_slots.popleft())
            else:
                empty -= 1
            loading = arrival[shard] = begin + (0.0 if shard in filled else seconds[kind][shard])
            filled.discard(shard)
        elif kind is Kind.DRAIN:
            compute = max(compute, reduced)
            if costs.reduce:
                loading = reduced = max(loading, compute) + costs.reduce[shard]
            draining = home[shard] = max(draining, compute, reduced) + seconds[kind][shard]
        elif kind is Kind.UPDATE and shard not in at_step:
            begin = max(updating, compute)
            if costs.updates_fill_slots:  # while the update before this one runs
                filling = max(filling, compute) + costs.load[shard]
                begin = max(begin, filling)
                filled.add(shard)
            updating = updated[shard] = begin + seconds[kind][shard]
        elif kind is Kind.UPDATE_IN_BACKWARD:
            updating = updated[shard] = max(updating, compute, home[shard]) + seconds[kind][shard]
            if costs.updates_fill_slots and shard not in choice.in_memory:
                held[shard] = updating
        elif kind is Kind.EVICT:
            if shard in held:
                in_slots.append(held.pop(shard))
            else:
                empty += 1
        elif kind is Kind.SPILL:
            compute = max(compute, leaving.popleft())
            moving = max(moving, compute) + seconds[kind][shard]
            leaving.append(moving)
        elif kind is Kind.PREFETCH:
            moving = back[shard, microbatch] = max(moving, compute) + seconds[kind][shard]
    return Forecast(max(compute, loading, draining, updating, moving), compute - computed, computed)


def _update_at_step(plan: Plan, at_step: frozenset[int], seconds: Sequence[float], updated: dict[int, float]) -> float:
    """Homes in host memory are updated in place, in order, as soon as the optimizer steps."""
    updating = 0.0
    for action in plan.actions:
        if action.kind is Kind.UPDATE and action.shard in at_step:
            updating = updated[action.shard] = updating + seconds[action.shard]
    return updating
