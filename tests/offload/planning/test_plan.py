"""The plan is data: it prints, parses, is proved and simulated without a tensor in sight."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning.plan import Kind, Plan, PlanError, plan_pass, plan_step, validate
from offload.planning.simulate import Costs, simulate


def test_the_plan_of_three_shards_in_two_slots_reads_like_the_design() -> None:
    plan = plan_step(3, slots=2, microbatches=2)
    assert str(plan) == ("L0 L1 F0.0 F0.1 E0 L2 F1.0 F1.1 F2.0 F2.1 B2.0 B2.1 D2 E2 L0 B1.0 B1.1 D1 B0.0 B0.1 D0")


def test_an_update_is_planned_before_the_next_load_of_its_shard_or_after_its_drain() -> None:
    before = plan_step(3, slots=2, pending=range(3), clips=True)
    assert str(before) == "U0 L0 U1 L1 F0.0 E0 U2 L2 F1.0 F2.0 B2.0 D2 E2 L0 B1.0 D1 B0.0 D0"
    behind = plan_step(3, slots=2, updates=True)
    assert str(behind) == "L0 L1 F0.0 E0 L2 F1.0 F2.0 B2.0 D2 U2 E2 L0 B1.0 D1 U1 B0.0 D0 U0"


@given(
    shards=st.integers(1, 12),
    slots=st.integers(1, 8),
    microbatches=st.integers(1, 4),
    training=st.booleans(),
    pending=st.sets(st.integers(0, 11)),
    updates=st.booleans(),
)
def test_every_plan_is_valid_prints_and_parses(
    shards: int, slots: int, microbatches: int, training: bool, pending: set[int], updates: bool
) -> None:
    pending &= set(range(shards))
    plan = plan_step(
        shards,
        slots=slots,
        microbatches=microbatches,
        training=training,
        pending=pending,
        updates=updates,
        clips=not updates,
    )
    validate(plan)
    assert Plan.parse(str(plan), slots, pending=pending, clips=not updates) == plan
    updated = [action.shard for action in plan.actions if action.kind is Kind.UPDATE]
    assert sorted(updated) == sorted([*pending, *(range(shards) if updates and training else ())])


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


def test_loads_run_one_visit_ahead_with_two_slots() -> None:
    plan = plan_step(5, slots=2)
    started: set[int] = set()
    for action in plan.actions:
        if action.kind is Kind.LOAD:
            started.add(action.shard)
        elif action.kind is Kind.FORWARD and action.shard < 4:
            assert action.shard + 1 in started
        elif action.kind is Kind.EVICT:
            started.discard(action.shard)
        elif action.kind is Kind.BACKWARD and action.shard > 0:
            assert action.shard - 1 in started


def test_a_pass_starts_from_what_is_resident() -> None:
    plan = plan_pass([2, 1, 0], Kind.BACKWARD, slots=2, microbatches=1, resident={1, 2})
    assert plan.loads == (0,)
    assert plan.resident_after == {0, 1}


@pytest.mark.parametrize(
    ("text", "slots", "reason"),
    [
        ("F0.0", 2, "not resident"),
        ("L0 L1 L2", 2, "all 2 slots are taken"),
        ("L0 L0", 2, "while it is resident"),
        ("L0 E0 E0", 2, "not resident"),
        ("L0 F0.0 F0.0", 2, "runs twice"),
        ("L0 B0.0", 2, "never drained"),
        ("L0 B0.0 D0 D0", 2, "no gradients to drain"),
        ("U0", 2, "no drained gradients"),
        ("L0 B0.0 U0 D0", 2, "no drained gradients"),
        ("L0 B0.0 D0 U0 U0", 2, "no drained gradients"),
        ("L0 B0.0 D0 U0 F0.0", 2, "updated since it was loaded"),
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
        ("U0 U0 L0", "no drained gradients"),
        ("U0 L0 L1 B1.0 D1 U1 B0.0 D0", "before the norm of all gradients is known"),
    ],
)
def test_an_update_out_of_order_is_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        validate(Plan.parse(text, 2, pending=[0], clips=True))
    validate(Plan.parse("U0 L0 L1 B1.0 D1 B0.0 D0 U1 U0", 2, pending=[0], clips=True))


def test_a_word_that_is_no_token_is_named() -> None:
    with pytest.raises(ValueError, match=r"'L1\.2'"):
        Plan.parse("L0 L1.2", 2)


def costs(shards: int, load: float, cell: float, drain: float, update: float = 0.0) -> Costs:
    return Costs([load] * shards, [cell] * shards, [2 * cell] * shards, [drain] * shards, 100, [update] * shards)


def test_updates_hide_behind_compute_but_for_the_first_and_are_waited_for_by_loads() -> None:
    plan = plan_step(6, slots=2, pending=range(6))
    forecast = simulate(plan, costs(6, load=1.0, cell=4.0, drain=0.0, update=3.0))
    # The second load waits for its update, which waits for the first one's: 3 + 3 + 1, of which compute hides 3.
    assert forecast.wait_seconds == 3.0 + 1.0
    assert forecast.seconds == 6 * 3 * 4.0 + 4.0
    slow = simulate(plan, costs(6, load=1.0, cell=0.1, drain=0.0, update=30.0))
    assert slow.seconds > 6 * 30.0


def test_an_update_in_backward_waits_for_the_drain_of_its_shard() -> None:
    plan = Plan.parse("L0 B0.0 D0 U0", 1)
    forecast = simulate(plan, costs(1, load=1.0, cell=1.0, drain=5.0, update=7.0))
    assert forecast.seconds == 1.0 + 2.0 + 5.0 + 7.0


def test_compute_bound_steps_hide_all_loads_but_the_first() -> None:
    forecast = simulate(plan_step(6, slots=2, microbatches=2), costs(6, load=1.0, cell=1.0, drain=1.0))
    assert forecast.compute_seconds == 6 * 2 * 3
    assert forecast.wait_seconds == 1.0
    assert forecast.seconds == 1.0 + 36.0 + 1.0  # the first load and the last drain stick out
    assert forecast.slot_bytes == 200


def test_io_bound_steps_take_as_long_as_their_loads() -> None:
    plan = plan_step(6, slots=2)
    forecast = simulate(plan, costs(6, load=10.0, cell=0.1, drain=1.0))
    assert forecast.seconds >= 10.0 * len(plan.loads)
    assert forecast.seconds <= 10.0 * (len(plan.loads) + 1) + 6 * 0.3 + 1


def test_plans_are_made_and_simulated_without_torch() -> None:
    code = (
        "import sys, types\n"
        "package = types.ModuleType('offload'); package.__path__ = ['offload']; sys.modules['offload'] = package\n"
        "import offload.planning.plan, offload.planning.simulate\n"
        "print(offload.planning.plan.plan_step(2, slots=2), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split()[-1] == "False"
