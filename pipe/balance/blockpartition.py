"""Block partition of a sequence: consecutive blocks, none empty, the largest as small as can be.

Layers run in order, so a partition may only cut the sequence, and the slowest block sets the pace of a pipeline. The
optimum is exact, by dynamic programming; among optimal partitions the one with the most even blocks (smallest sum of
squares) is taken, and among those the one with the earliest cuts, so that equal inputs give equal partitions.

Source: the problem is that of Bárány and Grinberg, "Block partitions of sequences" (2015); the algorithm that
torchgpipe takes from it is a heuristic for vectors and misses the optimum of numbers by up to 1.8 times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

__all__ = ["solve"]

Cost = TypeVar("Cost", int, float)


def solve(
    costs: Sequence[Cost],
    partitions: int = 1,
    *,
    sizes: Sequence[float] | None = None,
    limits: float | Sequence[float] | None = None,
) -> list[list[Cost]]:
    """Cuts ``costs`` into ``partitions`` blocks with the smallest maximum of their sums. O(partitions x n^2).

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
    size: list[float] = [0, *accumulate(weights)]

    def fits(k: int, start: int, stop: int) -> bool:
        return size[stop] - size[start] <= room[k]

    # Phase 1: smallest[stop] is the smallest maximum over the first k + 1 blocks of costs[:stop].
    infinity = float("inf")
    smallest = [0.0] + [infinity] * n
    for k in range(partitions):
        row = [infinity] * (n + 1)
        for stop in range(k + 1, n - (partitions - 1 - k) + 1):
            row[stop] = min(
                (max(smallest[start], cost[stop] - cost[start]) for start in range(k, stop) if fits(k, start, stop)),
                default=infinity,
            )
        smallest = row
    bound = smallest[n]
    if bound == infinity:
        raise ValueError(
            f"expected a partition within the limits, got none (sizes={weights}, limits={room}); "
            f"allow more per block or take more partitions"
        )

    # Phase 2: among the partitions whose blocks stay within that bound, the most even one. (Phase 1 could not prefer
    # even blocks as it went: it would give up prefixes that only a larger block later makes equally good.)
    even: list[float] = [0.0] + [infinity] * n
    cuts: list[list[int]] = []
    for k in range(partitions):
        row, origin = [infinity] * (n + 1), [0] * (n + 1)
        for stop in range(k + 1, n - (partitions - 1 - k) + 1):
            for start in range(k, stop):
                block = cost[stop] - cost[start]
                if block <= bound and fits(k, start, stop) and even[start] + block * block < row[stop]:
                    row[stop], origin[stop] = even[start] + block * block, start
        even = row
        cuts.append(origin)

    blocks: list[list[Cost]] = []
    stop = n
    for origin in reversed(cuts):
        blocks.append(list(costs[origin[stop] : stop]))
        stop = origin[stop]
    return blocks[::-1]


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
