"""The partition is the best there is, and the same every time."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipe.balance.blockpartition import solve


def all_partitions(n: Any, partitions: Any) -> Any:
    for cuts in itertools.combinations(range(1, n), partitions - 1):
        edges = [0, *cuts, n]
        yield [slice(a, b) for a, b in itertools.pairwise(edges)]


@st.composite
def problems(draw: Any) -> Any:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    return costs, draw(st.integers(1, len(costs)))


@given(problems())
def test_defect_pipe_12_no_partition_has_a_smaller_maximum_and_none_as_small_is_more_even(problem: Any) -> None:
    costs, partitions = problem
    blocks = solve(costs, partitions)
    assert list(itertools.chain(*blocks)) == costs
    assert len(blocks) == partitions
    assert all(blocks)

    def quality(parts: Any) -> Any:
        sums = [sum(part) for part in parts]
        return max(sums), sum(s * s for s in sums)

    assert quality(blocks) == min(quality([costs[s] for s in p]) for p in all_partitions(len(costs), partitions))
    assert blocks == solve(costs, partitions)


def test_the_worst_case_of_a_heuristic_and_ties_are_cut_early_and_evenly() -> None:
    assert [len(block) for block in solve([1, 1, 1, 1, 1, 6], 2)] == [5, 1]
    assert solve([1, 1, 1, 1, 1], 2) == [[1, 1], [1, 1, 1]]
    assert solve([0, 0, 0], 2) == [[0], [0, 0]]
    assert solve([5, 1, 1, 1, 1], 3) == [[5], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1), "from 1 to 0 partitions"),
        (([1], 2), "at least one element"),
        (([1], 0), "partitions=0"),
        (([1, -1], 1), "not negative"),
        (([1.0, float("nan")], 1), "not negative"),
    ],
)
def test_what_cannot_be_partitioned_is_named(arguments: Any, message: Any) -> None:
    with pytest.raises(ValueError, match=message):
        solve(*arguments)
