"""A schedule says what runs when, and what it says can be checked before."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.schedule import (
    Schedule,
    StageAction,
    clock_cycles,
    fill_drain,
    one_forward_one_backward,
)
from tests.pipe.turns import bubble, most_held

sizes = {"m": st.integers(1, 9), "n": st.integers(1, 6)}


@given(**sizes)
def test_fill_drain_runs_forward_in_clock_cycles(m: Any, n: Any) -> None:
    forward = [
        cells
        for clock in fill_drain(m, n).clocks()
        if (cells := [(a.micro_batch, a.stage) for a in clock if a.kind == "F"])
    ]
    assert forward == list(clock_cycles(m, n))


@given(**sizes)
def test_clock_cycles_visit_each_cell_once_and_no_stage_twice_in_a_clock(m: Any, n: Any) -> None:
    clocks = list(clock_cycles(m, n))
    assert len(clocks) == m + n - 1
    assert sorted(cell for clock in clocks for cell in clock) == [(i, j) for i in range(m) for j in range(n)]
    assert all(len({j for _, j in clock}) == len(clock) for clock in clocks)


@pytest.mark.parametrize("make", [fill_drain, one_forward_one_backward])
@given(**sizes)
def test_schedules_are_valid_and_print_what_they_parse(make: Any, m: Any, n: Any) -> None:
    schedule = make(m, n).validate()
    assert (schedule.stages, schedule.micro_batches) == (n, m)
    assert Schedule.parse(schedule.lines()) == schedule


@pytest.mark.parametrize("make", [fill_drain, one_forward_one_backward])
@given(**sizes)
def test_the_bubble_is_that_of_the_formula(make: Any, m: Any, n: Any) -> None:
    assert bubble(make(m, n)) == pytest.approx((n - 1) / (m + n - 1))


@given(**sizes)
def test_1f1b_holds_as_many_boundaries_as_stages_follow_and_fill_drain_holds_all(m: Any, n: Any) -> None:
    assert most_held(one_forward_one_backward(m, n)) == [min(m, n - j) for j in range(n)]
    assert most_held(fill_drain(m, n)) == [m] * n


def test_stages_on_one_device_take_turns_and_leave_no_bubble() -> None:
    schedule = fill_drain(4, 3, ["cpu"] * 3)
    assert bubble(schedule) == 0
    assert most_held(schedule) == [12]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 F0.0 B0.0", "F0.0 occurs 2 times"),
        ("F0.0 B0.0\nF1.0", "B1.0 occurs 0 times"),
        ("F0.0 B0.0\nF0.0 F1.0 B1.0", "F0.0 is in line 1, but its stage began in line 0"),
        ("B0.0 F0.0", "deadlock: B0.0 waits for F0.0"),
        ("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1", "B0.0 waits for B1.0, F1.1 waits for F0.1"),
        # Micro-batches and stages are numbered from 0, without a gap.
        ("F0.1 B0.1 F0.2 B0.2", "F0.0 occurs 0 times"),
        ("F0.0 B0.0 F0.2 B0.2", "F0.1 occurs 0 times"),
        ("F1.0 B1.0", "F0.0 occurs 0 times"),
    ],
)
def test_violations_are_named(text: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.parse(text).validate()


def test_all_violations_are_named_at_once_with_the_schedule() -> None:
    with pytest.raises(ValueError, match=r"F0.1 occurs 2 times; B0.1 occurs 0 times\nF0.0 B0.0 F0.1 F0.1"):
        Schedule.parse("F0.0 B0.0 F0.1 F0.1").validate()


def test_unknown_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an action such as"):
        StageAction.parse("X1.2")


def test_a_cell_whose_backward_follows_its_forward_is_known() -> None:
    schedule = one_forward_one_backward(3, 2)
    assert all(schedule.follows_at_once(1, i) for i in range(3))
    assert not any(schedule.follows_at_once(0, i) for i in range(2))
