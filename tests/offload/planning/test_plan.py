"""The plan is data: it prints, parses, is proved and simulated without a tensor in sight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.plan import CELLS, Kind, Plan
from offload.planning.planner import plan_step
from offload.planning.residency import Residency
from offload.planning.simulate import simulate
from offload.planning.step_model import Choice, Costs
from tests.offload.planning.proof import PlanError, validate


@given(
    shards=st.integers(1, 12),
    slots=st.integers(1, 8),
    microbatches=st.integers(1, 4),
    training=st.booleans(),
    pending=st.sets(st.integers(0, 11)),
    in_memory=st.sets(st.integers(0, 11)),
    updates=st.booleans(),
)
def test_every_plan_is_valid_prints_and_parses(
    shards: int, slots: int, microbatches: int, training: bool, pending: set[int], in_memory: set[int], updates: bool
) -> None:
    pending &= set(range(shards))
    in_memory &= set(range(shards))
    slots = min(slots, shards - len(in_memory))
    plan = plan_step(
        shards,
        slots=slots,
        microbatches=microbatches,
        training=training,
        in_memory=in_memory,
        pending=pending,
        updates=updates,
        clips=not updates,
    )
    validate(plan)
    assert Plan.parse(str(plan), slots, pending=pending, clips=not updates, in_memory=in_memory) == plan
    assert in_memory.isdisjoint(a.shard for a in plan.actions if a.kind in (Kind.LOAD, Kind.EVICT))
    simulate(plan, costs(shards, load=1.0, cell=1.0, drain=1.0), Choice(slots, frozenset(in_memory)))
    updated = {kind: sorted(a.shard for a in plan.actions if a.kind is kind) for kind in Kind}
    assert updated[Kind.UPDATE] == sorted(pending)
    assert updated[Kind.UPDATE_IN_BACKWARD] == (list(range(shards)) if updates and training else [])


@given(shards=st.integers(1, 30), slots=st.integers(2, 12), microbatches=st.integers(1, 3))
def test_spare_slots_are_a_cache(shards: int, slots: int, microbatches: int) -> None:
    loads = plan_step(shards, slots=slots, microbatches=microbatches).loads
    assert len(loads) <= max(shards, 2 * shards - (slots - 1))
    assert max(loads.count(j) for j in range(shards)) <= 2
    if slots >= shards:
        assert len(loads) == shards


def optimal_loads(uses: list[int], slots: int) -> int:
    """Fewest loads by brute force over all evictions."""
    states = {frozenset(): 0}
    for shard in uses:
        following: dict[frozenset[int], int] = {}
        for there, loads in states.items():
            if shard in there:
                options = [(there, loads)]
            elif len(there) < slots:
                options = [(there | {shard}, loads + 1)]
            else:
                options = [(there - {victim} | {shard}, loads + 1) for victim in there]
            for state, cost in options:
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


@given(shards=st.integers(1, 6), slots=st.integers(1, 6))
def test_no_plan_loads_less(shards: int, slots: int) -> None:
    uses = [*range(shards), *range(shards - 1, -1, -1)]
    assert len(plan_step(shards, slots=slots).loads) == optimal_loads(uses, slots)


@pytest.mark.parametrize(
    ("text", "slots", "reason"),
    [
        ("F0.0", 2, "not resident"),
        ("L0 L1 L2", 2, "all 2 slots are taken"),
        ("L0 F0.0 F0.0", 2, "runs twice"),
        ("L0 B0.0", 2, "never drained"),
        ("L0 B0.0 D0 D0", 2, "no gradients to drain"),
        ("L0 B0.0 D0 U0", 2, "no pending update"),
        ("L0 B0.0 V0 D0", 2, "no drained gradients"),
        ("L0 B0.0 D0 V0 F0.0", 2, "updated since it was loaded"),
        ("L0 K0.0 B0.0 D0", 2, "recomputed though its graph was kept"),
        ("L0 F0.0 G0.0 D0", 2, "was not kept"),
        ("L0 L1 F0.0 S1.0 F1.0", 2, "boundary that enters cell 1.0 is not in memory"),
        ("L0 L1 F0.0 S1.0 P1.0 S1.0", 2, "boundary 1.0 is written out twice"),
        ("L0 L1 F0.0 P1.0", 2, "boundary 1.0 is read back while it is in memory"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_with_an_arrow(text: str, slots: int, reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as caught:
        validate(Plan.parse(text, slots))
    assert "-->" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("L0 U0", "before its pending update"),
        ("U0 U0 L0", "no pending update"),
        ("U0 L0 L1 B1.0 D1 V1 B0.0 D0", "before the norm of all gradients is known"),
    ],
)
def test_an_update_out_of_order_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        validate(Plan.parse(text, 2, pending=[0], clips=True))
    validate(Plan.parse("U0 L0 L1 B1.0 D1 B0.0 D0 V1 V0", 2, pending=[0], clips=True))


def costs(shards: int, load: float, cell: float, drain: float, update: float = 0.0) -> Costs:
    return Costs([load] * shards, [cell] * shards, [2 * cell] * shards, [drain] * shards, [update] * shards)


@given(
    shards=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    boundaries=st.integers(0, 12),
    kept=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3))),
    first=st.integers(0, 4),
)
def test_boundaries_beyond_a_budget_leave_and_return_ahead_of_use(
    shards: int, microbatches: int, boundaries: int, kept: set[tuple[int, int]], first: int
) -> None:
    first = min(first, shards - 1)
    plan = plan_step(
        shards,
        slots=2,
        microbatches=microbatches,
        first=first,
        kept=kept,
        boundaries=Residency(10 * boundaries),
        boundary_sizes=lambda key: 10,
    )
    validate(plan)
    assert Plan.parse(str(plan), 2) == plan
    simulate(plan, Costs(*[[1.0] * shards] * 4, boundary=[1.0] * 6), Choice(2))
    for position, action in enumerate(plan.actions):
        if action.kind is Kind.PREFETCH:
            # No other cell than the one before its use comes in between, of those that read boundaries.
            cells = [a for a in plan.actions[position:] if a.kind in CELLS and a.kind is not Kind.BACKWARD_KEPT][:2]
            assert (action.shard, action.microbatch) in [(cell.shard, cell.microbatch) for cell in cells]
    if boundaries >= 4 + shards * microbatches:
        assert not {a.kind.value for a in plan.actions} & set("SPX")
    if not boundaries and shards > 2 and not kept and not first:
        assert {"S", "P"} <= {a.kind.value for a in plan.actions}
