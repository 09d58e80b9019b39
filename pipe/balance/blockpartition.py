"""Splits a sequence of costs into consecutive non-empty blocks such that the largest block sum is minimal.

Layers run in order, so blocks must be consecutive, and the slowest block determines the speed of a pipeline. The
optimum is exact; among optimal partitions the one with the most even blocks (smallest sum of squares) is chosen, and
among those the one with the earliest cuts, so that equal inputs give equal partitions.

Source: the problem is that of Bárány and Grinberg, "Block partitions of sequences" (2015); the algorithm that
torchgpipe takes from it is a heuristic for vectors, whose result can be up to 1.8 times the optimum for numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

__all__ = ["solve"]

_INFINITY = float("inf")

Cost = TypeVar("Cost", int, float)


def solve(costs: Sequence[Cost], partitions: int = 1) -> list[list[Cost]]:
    """Cuts ``costs`` into ``partitions`` blocks with the smallest maximum of their sums: O(partitions x n log n).

    Args:
        costs: the cost of each element; not negative, any unit.
        partitions: number of blocks, from 1 to ``len(costs)``.

    Returns:
        The blocks of ``costs``, in order; their lengths are a balance.

    Raises:
        ValueError: for another number of blocks, or a cost that is negative or not finite.
    """
    n = len(costs)
    if not 1 <= partitions <= n:
        raise ValueError(
            f"expected from 1 to {n} partitions for a sequence of {n}, got partitions={partitions}; "
            f"a block holds at least one element"
        )
    if any(not 0 <= cost < _INFINITY for cost in costs):
        raise ValueError(f"expected finite costs that are not negative, got costs={list(costs)}")
    cost: list[float] = [0, *accumulate(costs)]
    # First the bound, then among the partitions within it the most even one. A single pass could not do both: it would
    # discard prefixes that are not the best by themselves, but are part of an optimum because of a later larger block.
    origins = _most_even(cost, partitions, _smallest_bound(cost, partitions))
    blocks: list[list[Cost]] = []
    stop = n
    for origin in reversed(origins):
        blocks.append(list(costs[origin[stop] : stop]))
        stop = origin[stop]
    return blocks[::-1]


def _smallest_bound(cost: Sequence[float], partitions: int) -> float:
    """The smallest maximum of ``partitions`` blocks; ``cost`` are prefix sums.

    Filling blocks greedily up to a bound gives the fewest blocks. Fewer blocks than ``partitions`` are as good, since
    splitting a block makes none larger. So the bound is found by bisection, until no sum of a block is in between.
    """
    n = len(cost) - 1

    def largest(bound: float) -> float | None:
        """The largest sum of blocks filled up to ``bound``, or None if there are more than ``partitions``."""
        start, found = 0, 0.0
        for _ in range(partitions):
            stop = _reach(cost, start, bound)
            found = max(found, cost[stop] - cost[start])
            if stop == n:
                return found
            start = stop
        return None

    low = max(cost[k + 1] - cost[k] for k in range(n))  # no block is smaller than its largest element
    best = largest(low)
    if best is not None:
        return best
    high = cost[n] - cost[0]
    while True:
        middle = low + (high - low) / 2 if isinstance(high, float) or isinstance(low, float) else (low + high) // 2
        if not low < middle < high:
            return high
        found = largest(middle)
        low, high = (middle, high) if found is None else (low, min(found, high))


def _reach(cost: Sequence[float], start: int, bound: float) -> int:
    """The end of the longest block from ``start`` whose sum is within ``bound``."""
    stop = bisect_right(cost, cost[start] + bound, start + 1) - 1
    # Rounding: comparing prefix + bound and comparing the difference of prefixes may differ in the last digit.
    while stop + 1 < len(cost) and cost[stop + 1] - cost[start] <= bound:
        stop += 1
    while cost[stop] - cost[start] > bound:
        stop -= 1
    return stop


def _most_even(cost: Sequence[float], partitions: int, bound: float) -> list[list[int]]:
    """For each number of blocks and each end, the start of the last block in the most even partition within ``bound``.

    For squares of block sums, the best start does not decrease as the end increases (quadrangle inequality), so the
    starts for all ends are found by divide and conquer.
    """
    n = len(cost) - 1
    ends = [_reach(cost, start, bound) for start in range(n)]  # of the longest block from each beginning
    even: list[float] = [0.0] + [_INFINITY] * n
    first = last = 0  # the range of ends that k blocks can have
    origins: list[list[int]] = []
    for k in range(partitions):
        row, origin = [_INFINITY] * (n + 1), [0] * (n + 1)
        begins = range(first, min(last, n - 1) + 1)
        first, last = first + 1, min(ends[begins[-1]], n - (partitions - 1 - k))
        todo = [(first, last, begins[0], begins[-1])]
        while todo:
            low, high, least, most = todo.pop()
            if low > high:
                continue
            stop = (low + high) // 2
            best = least
            for start in range(least, min(most, stop - 1) + 1):
                if ends[start] >= stop:
                    total = even[start] + (cost[stop] - cost[start]) ** 2
                    if total < row[stop]:
                        row[stop], best = total, start
            origin[stop] = best
            todo += [(low, stop - 1, least, best), (stop + 1, high, best, most)]
        even = row
        origins.append(origin)
    return origins
