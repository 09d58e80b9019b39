"""Block partition of a sequence: consecutive blocks, none empty, the largest as small as can be.

Layers run in order, so a partition may only cut the sequence, and the slowest block sets the pace of a pipeline. The
optimum is exact; among optimal partitions the one with the most even blocks (smallest sum of
squares) is taken, and among those the one with the earliest cuts, so that equal inputs give equal partitions.

Source: the problem is that of Bárány and Grinberg, "Block partitions of sequences" (2015); the algorithm that
torchgpipe takes from it is a heuristic for vectors and misses the optimum of numbers by up to 1.8 times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

__all__ = ["solve"]

_INFINITY = float("inf")

Cost = TypeVar("Cost", int, float)


def solve(
    costs: Sequence[Cost],
    partitions: int = 1,
    *,
    sizes: Sequence[float] | None = None,
    limits: float | Sequence[float] | None = None,
) -> list[list[Cost]]:
    """Cuts ``costs`` into ``partitions`` blocks with the smallest maximum of their sums.

    O(partitions x n log n) without limits, O(partitions x n^2) with them.

    Args:
        costs: what each element adds to its block; not negative, any unit.
        partitions: number of blocks, from 1 to ``len(costs)``.
        sizes: what each element takes from its block's limit; by default its cost.
        limits: the most that the sizes of a block may add up to: one number for all, or one for each block.

    Returns:
        The blocks of ``costs``, in order; their lengths are a balance.

    Raises:
        ValueError: if the arguments do not fit together, or no partition stays within the limits.
    """
    n = len(costs)
    weights: list[float] = list(costs) if sizes is None else list(sizes)
    room = _limits_of_blocks(limits, partitions)
    _check(costs, weights, room, partitions)
    cost: list[float] = [0, *accumulate(costs)]
    # First the bound, then among the partitions within it the most even one. (A single pass could not prefer even
    # blocks as it goes: it would give up prefixes that only a larger block later makes equally good.)
    if limits is None:
        origins = _most_even(cost, partitions, _smallest_bound(cost, partitions))
    else:
        origins = _most_even_within(cost, [0, *accumulate(weights)], room)
    blocks: list[list[Cost]] = []
    stop = n
    for origin in reversed(origins):
        blocks.append(list(costs[origin[stop] : stop]))
        stop = origin[stop]
    return blocks[::-1]


def _smallest_bound(cost: Sequence[float], partitions: int) -> float:
    """The smallest maximum of ``partitions`` blocks; ``cost`` are prefix sums.

    Blocks filled up greedily to a bound are as few as can be, and fewer are as good as ``partitions``: splitting one
    makes none larger. So bounds are tried by bisection between sums of blocks, until no sum is left in between.
    """
    n = len(cost) - 1

    def largest(bound: float) -> float | None:
        """The largest block of those filled up to ``bound``, or None if they are too many."""
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
    # Rounding: prefix + bound may differ from the difference of prefixes in the last digit.
    while stop + 1 < len(cost) and cost[stop + 1] - cost[start] <= bound:
        stop += 1
    while cost[stop] - cost[start] > bound:
        stop -= 1
    return stop


def _most_even(cost: Sequence[float], partitions: int, bound: float) -> list[list[int]]:
    """For each number of blocks and each end, where the last block begins, in the most even partition within ``bound``.

    The square of a block's sum makes the best beginning move only forward as the end does (the quadrangle inequality),
    so the beginnings for all ends are found by halving.
    """
    n = len(cost) - 1
    ends = [_reach(cost, start, bound) for start in range(n)]  # of the longest block from each beginning
    even: list[float] = [0.0] + [_INFINITY] * n
    first = last = 0  # the ends that so many blocks can have
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


def _most_even_within(cost: Sequence[float], size: Sequence[float], room: Sequence[float]) -> list[list[int]]:
    """The same under limits of each block, with which neither greed nor halving is right: all is tried."""
    n, partitions = len(cost) - 1, len(room)

    def fits(k: int, start: int, stop: int) -> bool:
        return size[stop] - size[start] <= room[k]

    # smallest[stop] is the smallest maximum over the first k + 1 blocks that end at stop.
    smallest = [0.0] + [_INFINITY] * n
    for k in range(partitions):
        row = [_INFINITY] * (n + 1)
        for stop in range(k + 1, n - (partitions - 1 - k) + 1):
            row[stop] = min(
                (max(smallest[start], cost[stop] - cost[start]) for start in range(k, stop) if fits(k, start, stop)),
                default=_INFINITY,
            )
        smallest = row
    bound = smallest[n]
    if bound == _INFINITY:
        raise ValueError(
            f"expected a partition within the limits, got none (limits={list(room)}, sum of sizes={size[n]}); "
            f"allow more per block or take more partitions"
        )
    even: list[float] = [0.0] + [_INFINITY] * n
    origins: list[list[int]] = []
    for k in range(partitions):
        row, origin = [_INFINITY] * (n + 1), [0] * (n + 1)
        for stop in range(k + 1, n - (partitions - 1 - k) + 1):
            for start in range(k, stop):
                block = cost[stop] - cost[start]
                if block <= bound and fits(k, start, stop) and even[start] + block * block < row[stop]:
                    row[stop], origin[stop] = even[start] + block * block, start
        even = row
        origins.append(origin)
    return origins


def _limits_of_blocks(limits: float | Sequence[float] | None, partitions: int) -> list[float]:
    if limits is None:
        return [float("inf")] * partitions
    if isinstance(limits, (int, float)):
        return [limits] * partitions
    return list(limits)


def _check(costs: Sequence[float], sizes: Sequence[float], room: Sequence[float], partitions: int) -> None:
    n = len(costs)
    if not 1 <= partitions <= n:
        raise ValueError(
            f"expected from 1 to {n} partitions for a sequence of {n}, got partitions={partitions}; "
            f"a block holds at least one element"
        )
    if len(sizes) != n:
        raise ValueError(f"expected one size for each of {n} costs, got {len(sizes)} sizes")
    if len(room) != partitions:
        raise ValueError(f"expected one limit for each of {partitions} partitions, got {len(room)} limits")
    for name, values in (("costs", costs), ("sizes", sizes)):
        if any(not value >= 0 or value == float("inf") for value in values):
            raise ValueError(f"expected finite {name} that are not negative, got {name}={list(values)}")
