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


def test_a_thousand_elements_with_one_that_outweighs_all_take_no_square_of_their_number() -> None:
    class Counted(int):
        looked_at = 0

        def __sub__(self, other: Any) -> Any:
            Counted.looked_at += 1
            return int(self) - int(other)

        def __add__(self, other: Any) -> Any:
            return Counted(int(self) + int(other))

        __radd__ = __add__

    n = 400
    solve([Counted(10**6), *map(Counted, [1] * (n - 1))], n // 2)
    assert 0 < Counted.looked_at < (n // 2) * n * 12  # partitions x n log n; trying all takes (n // 2) x n x n


def test_the_worst_case_of_the_heuristic() -> None:
    assert [len(block) for block in solve([1, 1, 1, 1, 1, 6], 2)] == [5, 1]


def test_ties_are_cut_early_and_evenly() -> None:
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
