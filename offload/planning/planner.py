"""Makes the plans of steps that did not run yet, for previews, and predicts their time.

The order of use is known before a step starts: shards 0..n-1 in forward, n-1..0 in backward. The plan evicts the
resident shard whose next use is furthest away (Belady, 1966), and loads the next missing shard as soon as a slot is
free. So spare slots are a cache: the last shards of forward are still loaded when backward begins.

A step makes one boundary (activations between shards) for each (shard, micro-batch) and uses it twice: at once in
forward, and again in backward. Backward uses the last one first, so beyond a budget the earliest is spilled; it is read
back one cell ahead of its use. Boundaries, with the copies in flight, take no more than the budget, unless it is too
small for :data:`.MOVING` of them.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from offload.planning.plan import CELLS, Action, Kind, Plan
from offload.planning.step_model import MOVING, WRITES_IN_FLIGHT, Choice, Key, StepModel

__all__ = ["Forecast", "plan_step", "simulate"]


def plan_step(model: StepModel, choice: Choice) -> Plan:
    """Plans a whole step from empty slots: forward, and backward down to the first shard that it has to reach.

    Two slots are needed for loads that run ahead of use; none where all shards are used in memory.
    """
    first, parts, kept = model.first, len(model.rows), choice.kept
    before = iter(_loads(model.shards, choice.slots, first, choice.in_memory, model.updates.pending))
    largest = max(cell.enters for cells in model.cells for cell in cells)
    room = max(0.0, choice.boundary_bytes - MOVING * largest) if model.spills else math.inf
    there, away = deque[Key](), set[Key]()  # boundaries that stay in memory, and those that leave it
    actions: list[Action] = []
    for j, cells in enumerate(model.cells):
        actions += next(before)
        for i, cell in enumerate(cells):
            keeps = j >= first and (j, i) in kept
            actions.append(Action(Kind.FORWARD_KEPT if keeps else Kind.FORWARD, j, i))
            if j < first or keeps or not cell.enters:
                continue
            there.append((j, i))
            room -= cell.enters
            while room < 0 and len(there) > 1:
                away.add(spilled := there.popleft())
                room += model.cells[spilled[0]][spilled[1]].enters
                actions.append(Action(Kind.SPILL, *spilled))
    # Autograd runs the last cell first.
    backward = [(j, i) for j in range(model.shards - 1, first - 1, -1) for i in range(parts - 1, -1, -1)]
    following = dict(pairwise(cell for cell in backward if cell not in kept))
    for j, i in backward:
        if i == parts - 1:
            actions += next(before)
        if (ahead := following.get((j, i))) is not None and ahead in away:
            actions.append(Action(Kind.PREFETCH, *ahead))
        actions.append(Action(Kind.BACKWARD_KEPT if (j, i) in kept else Kind.BACKWARD, j, i))
        if i == 0:
            actions.append(Action(Kind.DRAIN, j))
            if model.updates.in_backward:
                actions.append(Action(Kind.UPDATE_IN_BACKWARD, j))
    return Plan(tuple(actions), choice.slots, pending=model.updates.pending, in_memory=choice.in_memory)


@lru_cache(maxsize=4)
def _loads(
    shards: int, slots: int, first: int, in_memory: frozenset[int], pending: frozenset[int]
) -> Sequence[Sequence[Action]]:
    """Updates, loads and evictions before each visit of a step. They are those of all plans that agree in these."""
    there: set[int] = set()
    to_update = set(pending)
    visits: list[list[Action]] = []
    # Of those that were used already, backward needs the first last, and the last never again.
    for order, furthest in ((range(shards), min), (range(shards - 1, first - 1, -1), max)):
        ahead, room = 0, slots  # loads run ahead of use until as many shards wait as there are slots
        for j in order:
            actions: list[Action] = []
            while ahead < len(order) and (room or order[ahead] in in_memory):
                k, ahead = order[ahead], ahead + 1
                streams = k not in in_memory
                room -= streams
                if streams and k not in there and len(there) == slots:
                    victim = furthest(there)
                    there.discard(victim)
                    actions.append(Action(Kind.EVICT, victim))
                if k in to_update:
                    to_update.discard(k)
                    actions.append(Action(Kind.UPDATE, k))
                if streams and k not in there:
                    there.add(k)
                    actions.append(Action(Kind.LOAD, k))
            room += j not in in_memory
            visits.append(actions)
    return visits


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
    loading = draining = updating = moving = computed = 0.0
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
            loading = arrival[shard] = max(loading, compute, updated.get(shard, 0.0)) + seconds[kind][shard]
        elif kind is Kind.DRAIN:
            draining = home[shard] = max(draining, compute) + seconds[kind][shard]
        elif kind is Kind.UPDATE and shard not in at_step:
            updating = updated[shard] = max(updating, compute) + seconds[kind][shard]
        elif kind is Kind.UPDATE_IN_BACKWARD:
            updating = updated[shard] = max(updating, compute, home[shard]) + seconds[kind][shard]
        elif kind is Kind.SPILL:
            compute = max(compute, leaving.popleft())
            moving = max(moving, compute) + seconds[kind][shard]
            leaving.append(moving)
        elif kind is Kind.PREFETCH:
            moving = back[shard, microbatch or 0] = max(moving, compute) + seconds[kind][shard]
    total = max(compute, loading, draining, updating, moving)
    return Forecast(total, compute - computed, computed)
