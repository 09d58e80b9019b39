"""Predicts the time of a plan: simulates it with one clock for compute and one for each lane.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.planning.plan import BACKWARD_CELLS, CELLS, Kind, Plan, validate
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
    #: Of an update of a shard that rests in memory; as ``update`` where it is empty.
    resting_update: Sequence[float] = ()
    #: Seconds that a cell loses to each second of a busy lane, where these share the cores.
    contention: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """What :func:`simulate` predicts."""

    #: Until compute and all copies are done; of these, waiting for copies, and computing.
    seconds: float
    wait_seconds: float
    compute_seconds: float
    #: Shard -> position in the plan of the first backward cell that begins after the gradients of that shard were
    #: stored; a recomputed cell begins when its recomputation is done. Missing if there is no such cell.
    drained: Mapping[int, int]


def simulate(plan: Plan, costs: Costs) -> Forecast:
    """Simulates a plan. Compute and lanes run in parallel and wait for each other only where the plan says."""
    validate(plan)
    compute = loading = draining = updating = moving = waited = computed = 0.0
    arrival = dict.fromkeys(plan.resident, 0.0)
    home: dict[int, float] = {}  # when gradients are home
    updated: dict[int, float] = {}
    leaving: deque[float] = deque()  # when boundaries are written
    back: dict[tuple[bool, int, int | None], float] = {}  # when gradients, or not, of boundaries are read back
    drained: dict[int, int] = {}
    lanes = _Lanes(costs.contention)
    for position, action in enumerate(plan.actions):
        shard, kind = action.shard, action.kind
        if kind is Kind.LOAD:
            begin = max(loading, compute, updated.get(shard, 0.0))
            loading = arrival[shard] = lanes.busy(begin, begin + costs.load[shard])
        elif kind is Kind.DRAIN:
            begin = max(draining, compute)
            draining = home[shard] = lanes.busy(begin, begin + costs.drain[shard])
        elif kind in (Kind.UPDATE, Kind.UPDATE_IN_BACKWARD):
            begin = max(updating, compute, home.get(shard, 0.0))
            resting = shard in plan.in_memory and bool(costs.resting_update)
            seconds = (costs.resting_update if resting else costs.update)[shard]
            updating = updated[shard] = lanes.busy(begin, begin + seconds)
            if kind is Kind.UPDATE_IN_BACKWARD:
                home[shard] = updating  # the gradients are kept until then
        elif kind in (Kind.SPILL, Kind.SPILL_GRADIENT):
            oldest = leaving.popleft() if len(leaving) == WRITES_IN_FLIGHT else compute
            waited += max(0.0, oldest - compute)
            compute = max(compute, oldest)
            moving = max(moving, compute) + costs.boundary[shard]
            leaving.append(moving)
        elif kind in (Kind.PREFETCH, Kind.PREFETCH_GRADIENT):
            moving = max(moving, compute) + costs.boundary[shard]
            back[kind is Kind.PREFETCH_GRADIENT, shard, action.microbatch] = moving
        elif kind in CELLS:
            if shard in plan.in_memory:
                arrival[shard] = updated.get(shard, 0.0)
            entered = 0.0 if kind is Kind.BACKWARD_KEPT else back.pop((False, shard, action.microbatch), 0.0)
            if kind in BACKWARD_CELLS:
                entered = max(entered, back.pop((True, shard + 1, action.microbatch), 0.0))
            there = updated.get(shard, 0.0) if shard in plan.in_memory else arrival[shard]
            start = max(compute, there, entered)
            seconds = lanes.slowed(start, _seconds(costs, kind)[shard])
            if kind in BACKWARD_CELLS:
                full = start + (costs.forward[shard] if kind is Kind.BACKWARD else 0.0)
                drained.update((j, position) for j, end in home.items() if j not in drained and end <= full)
            waited += start - compute
            computed += seconds
            compute = start + seconds
    end = max(compute, loading, draining, updating, moving)
    return Forecast(end, waited, computed, drained)


class _Lanes:
    """When lanes are busy, and how much longer cells take then."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._spans: list[tuple[float, float]] = []

    def busy(self, begin: float, end: float) -> float:
        """A lane is busy in this span; returns its end."""
        if self._share and end > begin:
            self._spans.append((begin, end))
        return end

    def slowed(self, start: float, seconds: float) -> float:
        """Seconds of a cell that takes ``seconds`` alone."""
        if not self._share:
            return seconds
        self._spans = [span for span in self._spans if span[1] > start]
        taken = seconds
        for _ in range(3):  # a longer cell meets more of the lanes' work
            end = start + taken
            overlap = sum(min(end, until) - max(start, begin) for begin, until in self._spans if begin < end)
            taken = seconds + self._share * overlap
        return taken


def _seconds(costs: Costs, kind: Kind) -> Sequence[float]:
    if kind not in BACKWARD_CELLS:
        return costs.forward
    return costs.kept_backward if kind is Kind.BACKWARD_KEPT and costs.kept_backward else costs.backward
