"""Splits a sequence of costs into consecutive non-empty blocks such that the largest block sum is minimal.

Layers run in order, so blocks must be consecutive, and the slowest block determines the speed of a pipeline. The
optimum is exact; among optimal partitions the one with the most even blocks (smallest sum of squares) is chosen, and
among those the one with the earliest cuts, so that equal inputs give equal partitions.

Source: the problem is that of Bárány and Grinberg, "Block partitions of sequences" (2015); the algorithm that
torchgpipe takes from it is a heuristic for vectors, whose result can be up to 1.8 times the optimum for numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

__all__ = ["solve"]

Cost = TypeVar("Cost", int, float)


def solve(costs: Sequence[Cost], partitions: int = 1) -> list[list[Cost]]:
    """Cuts ``costs`` into ``partitions`` blocks with the smallest maximum of their sums.

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
    if any(not 0 <= cost < math.inf for cost in costs):
        raise ValueError(f"expected finite costs that are not negative, got costs={list(costs)}")
    sums: list[float] = [0, *accumulate(costs)]
    # No block of an optimum is larger than an equal share and one element, so that few starts of a block come into
    # question. A single pass could not do both: it would discard prefixes that are not the most even by themselves, but
    # are part of an optimum because of a later larger block.
    bound, _ = _best(sums, partitions, (sums[-1] / partitions + max(costs)) * (1 + 1e-9), max, lambda cost: cost)
    _, cuts = _best(sums, partitions, bound, operator.add, lambda cost: cost * cost)
    return [list(costs[start:stop]) for start, stop in pairwise(cuts)]


def _best(
    sums: Sequence[float],
    partitions: int,
    bound: float,
    join: Callable[[float, float], float],
    weight: Callable[[float], float],
) -> tuple[float, list[int]]:
    """The smallest joined weight of blocks that are not above ``bound``, with the edges of the blocks.

    Args:
        sums: of the first costs.
        partitions: number of blocks.
        bound: the largest cost of a block.
        join: of the weights of the blocks before, and that of one more.
        weight: of a block, from its cost.
    """
    n = len(sums) - 1
    best: dict[int, float] = {0: weight(0)}  # for each end of the blocks so far
    starts: list[dict[int, int]] = []  # of the last block, for each number of blocks and each end
    for k in range(1, partitions + 1):
        joined, chosen = dict[int, float](), dict[int, int]()
        for stop in range(k, n - partitions + k + 1):
            # The best start does not decrease as the end increases.
            for start in range(stop - 1, chosen.get(stop - 1, k - 1) - 1, -1):
                cost = sums[stop] - sums[start]
                if cost > bound:
                    break
                if start in best:
                    total = join(best[start], weight(cost))
                    if stop not in joined or total <= joined[stop]:
                        joined[stop], chosen[stop] = total, start
        best = joined
        starts.append(chosen)
    edges = [n]
    for chosen in reversed(starts):
        edges.append(chosen[edges[-1]])
    return best[n], edges[::-1]
