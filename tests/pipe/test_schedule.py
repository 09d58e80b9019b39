"""Fill-drain and 1F1B: what runs in which clock."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.schedule import StageAction, fill_drain, one_forward_one_backward

sizes = {"m": st.integers(1, 9), "n": st.integers(1, 6)}


@pytest.mark.parametrize("make", [fill_drain, one_forward_one_backward])
@given(**sizes, in_turns=st.booleans())
def test_each_action_runs_once_when_all_that_it_needs_has_run(make: Any, m: int, n: int, in_turns: bool) -> None:
    done: set[StageAction] = set()
    for clock in make(m, n, in_turns):
        assert len({action.stage for action in clock}) == len(clock)
        for kind, j, i in clock:
            following = [StageAction("F", j, i), *([StageAction("B", j + 1, i)] if j + 1 < n else [])]
            assert done.issuperset(following if kind == "B" else [StageAction("F", j - 1, i)] * (j > 0))
        assert done.isdisjoint(clock)
        done.update(clock)
    assert len(done) == 2 * m * n
    # The bubble is that of the formula.
    assert len(make(m, n, in_turns)) == (2 * m * n if in_turns else 2 * (m + n - 1))


@given(**sizes)
def test_1f1b_holds_as_many_boundaries_as_stages_follow_and_fill_drain_holds_all(m: int, n: int) -> None:
    def most_held(clocks: list[list[StageAction]], j: int) -> int:
        return max(accumulate(1 if a.kind == "F" else -1 for clock in clocks for a in clock if a.stage == j))

    for j in range(n):
        assert most_held(one_forward_one_backward(m, n), j) == min(m, n - j)
        assert most_held(fill_drain(m, n), j) == m


def test_1f1b_is_that_of_the_paper() -> None:
    clocks = [" ".join(map(str, clock)) for clock in one_forward_one_backward(3, 2)]
    assert clocks == ["F0.0", "F0.1 F1.0", "B1.0", "F1.1 B0.0", "F0.2 B1.1", "F1.2 B0.1", "B1.2", "B0.2"]


def test_where_stages_take_turns_each_runs_all_micro_batches_before_the_next() -> None:
    expected = ["F0.0", "F0.1", "F1.0", "F1.1", "B1.1", "B1.0", "B0.1", "B0.0"]
    for make in (fill_drain, one_forward_one_backward):
        assert [str(action) for (action,) in make(2, 2, True)] == expected
