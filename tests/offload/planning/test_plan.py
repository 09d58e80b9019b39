"""The plan is data: it prints, is proved and timed without a tensor in sight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offload.planning.plan import CELLS, Kind
from offload.planning.planner import forecast, plan_step
from offload.planning.step_model import MOVING, Choice, Costs, StepModel, Updates
from tests.offload.planning.proof import plan_of, validate


def model_of(shards: int, microbatches: int = 1, **more: Any) -> StepModel:
    each = [1.0] * shards
    costs = Costs(forward=each, backward=each, kept_backward=each, load=1.0, drain=1.0, update=1.0, boundary=1.0)
    sizes: Any = {name: [1] * shards for name in ("slot_bytes", "loaded_bytes", "gradient_bytes")}
    return StepModel(shards=shards, costs=costs, rows=[1] * microbatches, **sizes, **more)


@given(
    shards=st.integers(1, 12),
    slots=st.integers(1, 8),
    microbatches=st.integers(1, 4),
    training=st.booleans(),
    pending=st.sets(st.integers(0, 11)),
    in_memory=st.sets(st.integers(0, 11)),
    in_backward=st.booleans(),
)
def test_every_plan_is_valid_and_prints(
    shards: int,
    slots: int,
    microbatches: int,
    training: bool,
    pending: set[int],
    in_memory: set[int],
    in_backward: bool,
) -> None:
    pending &= set(range(shards))
    choice = Choice(min(slots, shards - len(in_memory & {*range(shards)})), frozenset(in_memory & {*range(shards)}))
    updates, first = Updates(frozenset(pending), in_backward), 0 if training else shards
    model = model_of(shards, microbatches, first=first, updates=updates)
    plan = plan_step(model, choice)
    validate(plan, clips=not in_backward)
    assert plan_of(str(plan), choice.slots).actions == plan.actions
    assert in_memory.isdisjoint(a.shard for a in plan.actions if a.kind in (Kind.LOAD, Kind.EVICT))
    predicted = forecast(plan, model, choice)
    assert predicted.seconds >= predicted.compute_seconds == shards * microbatches * (1 + training)
    updated = {kind: sorted(a.shard for a in plan.actions if a.kind is kind) for kind in Kind}
    assert updated[Kind.UPDATE] == sorted(pending)
    assert updated[Kind.UPDATE_IN_BACKWARD] == (list(range(shards)) if in_backward and training else [])


@given(shards=st.integers(2, 6))
def test_nothing_hides_the_first_update_and_load_nor_the_last_gradients(shards: int) -> None:
    model = model_of(shards, updates=Updates(frozenset(range(shards))))
    model = replace(model, costs=replace(model.costs, load=0.25, drain=0.5, update=0.125))
    streams, rests = Choice(2), Choice(0, frozenset(range(shards)))
    assert forecast(plan_step(model, streams), model, streams).wait_seconds == 0.125 + 0.25 + 0.5
    seconds = forecast(plan_step(model, rests), model, rests).wait_seconds
    assert seconds == sum(model.seconds(rests)[Kind.UPDATE]), "where all rests, step() waits for all updates alone"


@given(shards=st.integers(1, 6), slots=st.integers(1, 6))
def test_each_shard_is_loaded_twice_but_for_those_that_stay_in_slots_between_passes(shards: int, slots: int) -> None:
    assert len(plan_step(model_of(shards), Choice(slots)).loads) == 2 * shards - min(slots, shards)


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
    model, choice = (
        model_of(shards, microbatches, first=first, boundaries=lambda j, rows: 10),
        Choice(2, kept=frozenset(kept), boundary_bytes=10 * boundaries),
    )
    plan = plan_step(model, choice)
    validate(plan)
    forecast(plan, model, choice)
    for position, action in enumerate(plan.actions):
        if action.kind is Kind.PREFETCH:
            # No other cell than the one before its use comes in between, of those that read boundaries.
            cells = [a for a in plan.actions[position:] if a.kind in CELLS and a.kind is not Kind.BACKWARD_KEPT][:2]
            assert (action.shard, action.microbatch) in [(cell.shard, cell.microbatch) for cell in cells]
    if boundaries >= MOVING + shards * microbatches:
        assert not {a.kind.value for a in plan.actions} & set("SPX")
    if not boundaries and shards > 2 and not kept and not first:
        assert {"S", "P"} <= {a.kind.value for a in plan.actions}
