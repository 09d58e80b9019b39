"""Predicts the time of a plan: simulates it with one clock for compute and one for each lane.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from offload.planning.plan import BACKWARD_CELLS, CELLS, Action, Kind, Plan
from offload.planning.residency import WRITES_IN_FLIGHT

__all__ = ["Costs", "Forecast", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Seconds of an action of each shard; of ``forward`` and ``backward``, of one cell.

    ``backward`` includes the recomputation, ``kept_backward`` is that of a cell whose graph was kept. ``boundary``: of
    a copy of a boundary or its gradient; the additional last entry is for the output.
    """

    load: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    drain: Sequence[float]
    update: Sequence[float] = ()
    boundary: Sequence[float] = ()
    kept_backward: Sequence[float] = ()
    #: Of copying gradients to host memory, where they wait for their update. Empty: they are not copied.
    waiting_drain: Sequence[float] = ()
    #: Of an update of a shard that rests in memory; as ``update`` where it is empty.
    resting_update: Sequence[float] = ()
    #: The shards whose homes are updated in place as soon as the optimizer steps, besides those that rest in memory.
    updated_at_step: Set[int] = frozenset()
    #: Whether an update of another shard reads its weights into the slot of the load that follows, and leaves the new
    #: ones there.
    updates_fill_slots: bool = False
    #: With several ranks: a drain reduces before it stores, on the lane of loads.
    reduce: Sequence[float] = ()


@dataclass(frozen=True)
class Forecast:
    """What :func:`simulate` predicts."""

    #: Until compute and all copies are done; of these, waiting for copies, and computing.
    seconds: float
    wait_seconds: float
    compute_seconds: float


def simulate(plan: Plan, costs: Costs) -> Forecast:
    """Simulates a plan. Compute and lanes run in parallel and wait for each other only where the plan says."""
    loading = filling = draining = moving = waited = computed = 0.0
    compute = updating = 0.0
    arrival = dict.fromkeys(plan.resident, 0.0)
    home: dict[int, float] = {}  # when gradients are home
    updated: dict[int, float] = {}
    leaving: deque[float] = deque()  # when boundaries are written
    back: dict[tuple[int, int | None], float] = {}  # when boundaries are read back
    reduced: dict[int, float] = {}  # with several ranks: when gradients can be stored
    filled: set[int] = set()  # slots that the update before a load has filled
    empty = plan.slots - len(plan.resident)
    held: dict[int, float] = {}  # when updates in backward end that write to the slot of their shard
    in_slots: deque[float] = deque()  # the same of shards that were evicted meanwhile
    at_step = plan.in_memory | costs.updated_at_step
    for action in plan.actions:
        if action.kind is Kind.UPDATE and action.shard in at_step:
            begin, seconds = updating, _update_seconds(plan, costs, action.shard)
            updating = updated[action.shard] = begin + seconds
    if len(plan.in_memory) == len(costs.load):
        # Nothing is loaded beside them: the optimizer's step waits for its updates.
        waited, compute = updating - compute, updating
    for action in _with_reductions(plan) if costs.reduce else plan.actions:
        shard, kind = action.shard, action.kind
        if kind is Kind.LOAD:
            begin = max(loading, compute, updated.get(shard, 0.0))
            if empty <= 0 and in_slots:
                begin = max(begin, in_slots.popleft())
            else:
                empty -= 1
            seconds = 0.0 if shard in filled else costs.load[shard]
            filled.discard(shard)
            loading = arrival[shard] = begin + seconds
        elif kind is Kind.DRAIN and costs.reduce and shard not in reduced:
            begin = max(loading, compute)
            loading = reduced[shard] = begin + costs.reduce[shard]
        elif kind is Kind.DRAIN:
            arrived = reduced.pop(shard, compute)
            waited += max(0.0, arrived - compute)
            compute = max(compute, arrived)
            begin = max(draining, compute)
            draining = home[shard] = begin + costs.drain[shard]
        elif kind is Kind.UPDATE:
            if shard in at_step:
                continue
            begin = max(updating, compute)
            if costs.updates_fill_slots:  # while the update before this one runs
                read = max(filling, compute)
                filling = read + costs.load[shard]
                begin = max(begin, filling)
                filled.add(shard)
            updating = updated[shard] = begin + costs.update[shard]
        elif kind is Kind.UPDATE_IN_BACKWARD:
            begin, seconds = max(updating, compute, home.get(shard, 0.0)), _update_seconds(plan, costs, shard)
            updating = updated[shard] = begin + seconds
            home[shard] = updating  # the gradients are kept until then
            if costs.updates_fill_slots and shard not in plan.in_memory:
                held[shard] = updating
        elif kind is Kind.EVICT:
            if shard in held:
                in_slots.append(held.pop(shard))
            else:
                empty += 1
        elif kind is Kind.SPILL:
            oldest = leaving.popleft() if len(leaving) == WRITES_IN_FLIGHT else compute
            waited += max(0.0, oldest - compute)
            compute = max(compute, oldest)
            moving = max(moving, compute) + costs.boundary[shard]
            leaving.append(moving)
        elif kind is Kind.PREFETCH:
            moving = max(moving, compute) + costs.boundary[shard]
            back[shard, action.microbatch] = moving
        elif kind in CELLS:
            if shard in plan.in_memory:
                arrival[shard] = updated.get(shard, 0.0)
            entered = 0.0 if kind is Kind.BACKWARD_KEPT else back.pop((shard, action.microbatch), 0.0)
            there = updated.get(shard, 0.0) if shard in plan.in_memory else arrival[shard]
            start = max(compute, there, entered)
            seconds = _seconds(costs, kind)[shard]
            waited += start - compute
            computed += seconds
            compute = start + seconds
    end = max(compute, loading, draining, updating, moving)
    return Forecast(end, waited, computed)


def _with_reductions(plan: Plan) -> Iterator[Action]:
    """The actions, where each drain starts a reduction and is repeated where it is stored.

    That is at the next drain, while further shards compute, or at the end; an update in backward follows it.
    """
    deferred: list[Action] = []
    for action in plan.actions:
        if action.kind is Kind.DRAIN:
            yield from deferred
            deferred = [action]
            yield action
        elif action.kind is Kind.UPDATE_IN_BACKWARD:
            deferred.append(action)
        else:
            yield action
    yield from deferred


def _update_seconds(plan: Plan, costs: Costs, shard: int) -> float:
    resting = shard in plan.in_memory and bool(costs.resting_update)
    return (costs.resting_update if resting else costs.update)[shard]


def _seconds(costs: Costs, kind: Kind) -> Sequence[float]:
    if kind not in BACKWARD_CELLS:
        return costs.forward
    return costs.kept_backward if kind is Kind.BACKWARD_KEPT and costs.kept_backward else costs.backward
