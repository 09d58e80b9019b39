"""Which cells keep their graphs instead of being recomputed: those that backward begins with, as far as they fit.

Backward uses a kept graph before it recomputes anything, so the bytes of kept graphs and those of a recomputed cell are
never needed at the same time; and gradients, which appear shard by shard as backward goes on, find the room that the
graphs gave up.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.planning.residency import Key

__all__ = ["graphs_that_fit"]


def graphs_that_fit(
    bytes_per_row: Sequence[float | None], rows: Sequence[int], *, first: int, budget_bytes: int
) -> frozenset[Key]:
    """The cells whose graphs fit in a budget together, in the order of backward up to the first that does not.

    Args:
        bytes_per_row: what the graph of each shard keeps of one row; None where that is not known yet.
        rows: of each micro-batch.
        first: the first shard that backward has to reach.
        budget_bytes: for all of them.
    """
    kept: list[Key] = []
    left = float(budget_bytes)
    for j in range(len(bytes_per_row) - 1, first - 1, -1):
        each = bytes_per_row[j]
        if each is None:
            break
        for i, count in enumerate(rows):
            left -= each * count
            if left < 0:
                return frozenset(kept)
            kept.append((j, i))
    return frozenset(kept)
