"""Makes the plans of steps that did not run yet, for previews and predictions.

The order of use is known before a step starts: shards 0..n-1 in forward, n-1..0 in backward. The plan evicts the
resident shard whose next use is furthest away (Belady, 1966), and loads the next missing shard as soon as a slot is
free. So spare slots are a cache: the last shards of forward are still loaded when backward begins. Boundaries are
treated alike (:mod:`offload.planning.residency`).

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TypedDict

from offload.planning.plan import Action, Kind, Plan
from offload.planning.residency import Key, Residency

__all__ = ["Sizes", "Updates", "plan_step"]

#: Bytes of the boundary that enters a cell, or of its gradient.
Sizes = Callable[[Key], int]


class Updates(TypedDict):
    """What an optimizer adds to a plan: see :func:`plan_step`."""

    pending: frozenset[int]
    updates: bool
    clips: bool


def plan_step(
    shards: int,
    *,
    slots: int,
    microbatches: int = 1,
    training: bool = True,
    first: int = 0,
    kept: Collection[Key] = frozenset(),
    in_memory: Collection[int] = frozenset(),
    pending: Collection[int] = (),
    updates: bool = False,
    clips: bool = False,
    boundaries: Residency | None = None,
    boundary_sizes: Sizes = lambda key: 0,
    grows: bool = False,
) -> Plan:
    """Plans a whole step from empty slots: forward, and backward where ``training``.

    Args:
        shards: their number; ``slots`` of them are loaded at a time. Two slots are needed for loads that run ahead of
            use; none where all shards are used in memory.
        microbatches: of which each shard runs all.
        training: whether there is a backward.
        first: the first shard that backward has to reach.
        kept: cells that keep their graphs from forward to backward.
        in_memory: shards that are used where they rest: never loaded, in no slot.
        pending: shards that must be updated before they are loaded, or used in memory.
        updates: whether a shard is updated as soon as its gradients are drained.
        clips, grows: see :class:`.Plan`.
        boundaries: which boundaries stay in memory; all, if left out.
        boundary_sizes: bytes of the boundary that enters a cell, as far as it is known, else 0.
    """
    if slots < 1 and not {*range(shards)} <= {*in_memory}:
        raise ValueError(f"expected at least 1 slot, got slots={slots}")
    first = first if training else shards
    before = iter(_loads(shards, slots, first, frozenset(in_memory), frozenset(pending)))
    kept = {cell for cell in kept if cell[0] >= first}
    # Autograd runs the last cell first.
    backward = [(j, i) for j in range(shards - 1, first - 1, -1) for i in range(microbatches - 1, -1, -1)]
    recomputed = [cell for cell in backward if cell not in kept]
    actions: list[Action] = []
    entering = {*recomputed} if boundaries is not None else set()
    for j in range(shards):
        actions += next(before)
        for i in range(microbatches):
            actions.append(Action(Kind.FORWARD_KEPT if (j, i) in kept else Kind.FORWARD, j, i))
            if boundaries is not None and (j, i) in entering and (j or grows):
                actions += boundaries.put((j, i), boundary_sizes((j, i)))
    following = dict(pairwise(recomputed)) if boundaries is not None else {}
    for j, i in backward:
        if i == microbatches - 1:
            actions += next(before)
        if boundaries is not None and (j, i) in entering:
            boundaries.drop((j, i))
            actions += boundaries.prefetch(following.get((j, i), (-1, 0)))
        actions.append(Action(Kind.BACKWARD_KEPT if (j, i) in kept else Kind.BACKWARD, j, i))
        if i == 0:
            actions.append(Action(Kind.DRAIN, j))
            if updates:
                actions.append(Action(Kind.UPDATE_IN_BACKWARD, j))
    return Plan(
        tuple(actions), slots, pending=frozenset(pending), clips=clips, in_memory=frozenset(in_memory), grows=grows
    )


@lru_cache(maxsize=4)
def _loads(
    shards: int, slots: int, first: int, in_memory: frozenset[int], pending: frozenset[int]
) -> Sequence[Sequence[Action]]:
    """Updates, loads and evictions before each visit of a step. They are those of all plans that agree in these."""
    there: set[int] = set()
    to_update = set(pending)
    visits: list[list[Action]] = []
    # Of those that were used already, backward needs the first last, and the last never again.
    for order, furthest in ((range(shards), min), (range(shards - 1, first - 1, -1), max)):
        ahead, room = 0, slots  # loads run ahead of use until as many shards wait as there are slots
        for j in order:
            actions: list[Action] = []
            while ahead < len(order) and (room or order[ahead] in in_memory):
                k, ahead = order[ahead], ahead + 1
                streams = k not in in_memory
                room -= streams
                if streams and k not in there and len(there) == slots:
                    victim = furthest(there)
                    there.discard(victim)
                    actions.append(Action(Kind.EVICT, victim))
                if k in to_update:
                    to_update.discard(k)
                    actions.append(Action(Kind.UPDATE, k))
                if streams and k not in there:
                    there.add(k)
                    actions.append(Action(Kind.LOAD, k))
            room += j not in in_memory
            visits.append(actions)
    return visits
