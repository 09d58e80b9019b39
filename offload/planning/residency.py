"""Plans which boundaries (activations between shards) stay in memory and which are spilled, from sizes and uses.

A step makes one boundary for each (shard, micro-batch) and uses it twice: at once in forward, and again in backward.
Their number grows with depth times batch. Beyond a budget, the boundary whose next use is furthest away is spilled, and
prefetched ahead of that use.

Guarantees
    * Boundaries, with the copies in flight, take no more than the budget. A budget that is too small for :data:`MOVING`
      of them is exceeded.
    * A boundary is written once, however often it is read back.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.plan import Action, Kind

__all__ = ["MOVING", "WRITES_IN_FLIGHT", "Key", "Residency", "TooLargeError"]

#: (shard, micro-batch) of the cell that a boundary enters.
Key = tuple[int, int]

#: Maximum number of boundaries that are being written at a time.
WRITES_IN_FLIGHT = 2

#: Boundaries in motion: one that a layer reads, one that is being read back, those being written.
MOVING = 2 + WRITES_IN_FLIGHT


class TooLargeError(ValueError):
    """A step is known not to fit, before anything of it has moved."""


@dataclass(eq=False, slots=True)
class _Boundary:
    key: Key
    nbytes: int
    uses: deque[int]
    #: In memory, or being read back.
    here: bool = True
    #: Being read back for its next use.
    coming: bool = False
    written: bool = False

    @property
    def next_use(self) -> float:
        return self.uses[0] if self.uses else float("inf")


class Residency:
    """The boundaries of one forward; or, if ``gradients``, the gradients of boundaries in one backward.

    Each method returns actions that the caller has to perform in this order. Keys that were never put (inputs of the
    model) are ignored.
    """

    def __init__(self, budget_bytes: float, *, gradients: bool = False) -> None:
        self._spill = Kind.SPILL_GRADIENT if gradients else Kind.SPILL
        self._prefetch = Kind.PREFETCH_GRADIENT if gradients else Kind.PREFETCH
        self._forget = Kind.FORGET_GRADIENT if gradients else Kind.FORGET
        self._budget_bytes = budget_bytes
        self._largest = 0
        #: For boundaries that no cell is reading: the budget without those in motion.
        self._room = budget_bytes
        self._all: dict[Key, _Boundary] = {}
        #: In memory, without the one that a cell is reading.
        self._held: dict[_Boundary, None] = {}
        self._bytes = 0
        #: (- next use, number, boundary): those that may be spilled, the one with the last use first. An entry whose
        #: boundary has left memory, or is used at another time by now, is out of date.
        self._order: list[tuple[float, int, _Boundary]] = []
        self._number = itertools.count()

    def put(self, key: Key, nbytes: int, uses: Sequence[int]) -> list[Action]:
        """Adds a boundary that is used at these ascending positions of the step."""
        boundary = self._all[key] = _Boundary(key, nbytes, deque(uses))
        self._count(nbytes)
        return self._keep(boundary)

    def _count(self, nbytes: int) -> None:
        if nbytes > self._largest:
            self._largest = nbytes
            self._room = max(0, self._budget_bytes - MOVING * nbytes)

    def use(self, key: Key, now: int) -> list[Action]:
        """A cell at position ``now`` is about to read a boundary."""
        boundary = self._all.get(key)
        if boundary is None:
            return []
        while boundary.uses and boundary.uses[0] <= now:
            boundary.uses.popleft()
        # Spills come before the prefetch. Without this, one boundary too many is in motion.
        actions = [] if boundary.here else [*self._make_room(None, now), Action(self._prefetch, *key)]
        boundary.here, boundary.coming = True, False
        self._leave(boundary)
        return actions

    def end_use(self, key: Key) -> list[Action]:
        """The cell is over, and the boundary is needed later."""
        boundary = self._all.get(key)
        return [] if boundary is None else self._keep(boundary)

    def prefetch(self, key: Key) -> list[Action]:
        """Reads a spilled boundary back, for the next cell."""
        boundary = self._all.get(key)
        if boundary is None or boundary.here:
            return []
        boundary.here = boundary.coming = True
        return [*self._keep(boundary), Action(self._prefetch, *key)]

    def drop(self, key: Key) -> None:
        """Removes a boundary that has no further use."""
        boundary = self._all.pop(key, None)
        if boundary is not None:
            self._leave(boundary)

    def _leave(self, boundary: _Boundary) -> None:
        if boundary in self._held:
            del self._held[boundary]
            self._bytes -= boundary.nbytes

    def _keep(self, boundary: _Boundary) -> list[Action]:
        """Keeps a boundary in memory; spills others, or itself, if the budget is exceeded."""
        self._held[boundary] = None
        self._bytes += boundary.nbytes
        if boundary.nbytes and not boundary.coming and self._budget_bytes != math.inf:
            heapq.heappush(self._order, (-boundary.next_use, next(self._number), boundary))
        return self._make_room(boundary, boundary.next_use) if self._bytes > self._room else []

    def _make_room(self, new: _Boundary | None, needed: float) -> list[Action]:
        """Spills boundaries, the one with the last use first; or ``new``, if all others are used sooner."""
        actions: list[Action] = []
        while self._bytes > self._room:
            victim = self._last_used(new)
            if victim is None or victim.next_use <= needed:
                if new is None or new.coming or self._bytes == new.nbytes:
                    break  # it is needed in memory now, or is the only one
                victim = new
            actions.append(Action(self._forget if victim.written else self._spill, *victim.key))
            victim.here, victim.written = False, True
            self._leave(victim)
            if victim is new:
                break
        return actions

    def _last_used(self, new: _Boundary | None) -> _Boundary | None:
        """The boundary in memory with the last use, except ``new`` and those that are being read back."""
        found, aside = None, None
        while self._order and found is None:
            use, _, boundary = self._order[0]
            if boundary not in self._held or boundary.coming or boundary.next_use != -use:
                heapq.heappop(self._order)
            elif boundary is new:
                aside = heapq.heappop(self._order)
            else:
                found = boundary
        if aside is not None:
            heapq.heappush(self._order, aside)
        return found
