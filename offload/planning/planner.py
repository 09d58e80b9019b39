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
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from offload.planning.plan import BACKWARD_CELLS, CELLS, Action, Kind, Plan
from offload.planning.step_model import MOVING, Choice, Key, StepModel

__all__ = ["LANES", "Forecast", "forecast", "plan_step"]

#: What takes time, and what does it.
LANES = {
    **dict.fromkeys(CELLS, "compute"),
    Kind.LOAD: "loads",
    Kind.DRAIN: "gradients",
    Kind.UPDATE: "updates",
    Kind.UPDATE_IN_BACKWARD: "updates",
    Kind.SPILL: "boundaries",
    Kind.PREFETCH: "boundaries",
}


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
    """What :func:`forecast` predicts."""

    #: Of the step; of these, waiting for copies, and computing.
    seconds: float
    wait_seconds: float
    compute_seconds: float


def forecast(plan: Plan, model: StepModel, choice: Choice) -> Forecast:
    """The time of a plan: compute and lanes run side by side, and in each pass the one that takes longest decides.

    Nothing computes before the first shard is updated and loaded, nor while the last gradients are stored.
    """
    seconds = model.seconds(choice)
    forward, backward = defaultdict[str, float](float), defaultdict[str, float](float)
    now = forward
    for kind, shard, _ in plan.actions:
        if kind in BACKWARD_CELLS:
            now = backward
        if kind in LANES:
            now[LANES[kind]] += seconds[kind][shard]
    ends = {(Kind.UPDATE, 0), (Kind.LOAD, 0), (Kind.DRAIN, model.first)}
    alone = {a[:2]: seconds[a.kind][a.shard] for a in plan.actions if a[:2] in ends}
    # If nothing is loaded beside them, the optimizer's step waits for its updates.
    waits = forward.pop("updates", 0.0) if len(choice.in_memory) == model.shards else sum(alone.values())
    computed = forward["compute"] + backward["compute"]
    total = waits + max(forward.values()) + max(backward.values())
    return Forecast(total, total - computed, computed)
