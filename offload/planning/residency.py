"""Plans which boundaries (activations between shards) stay in memory and which are spilled, from their sizes.

A step makes one boundary for each (shard, micro-batch) and uses it twice: at once in forward, and again in backward.
Their number grows with depth times batch. Backward uses the last one first, so beyond a budget the earliest is spilled;
it is read back one cell ahead of its use.

Guarantee: boundaries, with the copies in flight, take no more than the budget. A budget that is too small for
:data:`MOVING` of them is exceeded.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

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


class Residency:
    """The boundaries of one step.

    Methods return actions that the caller has to perform in this order. Keys that were never put (inputs of the model)
    are ignored.
    """

    def __init__(self, budget_bytes: float) -> None:
        self._budget_bytes = budget_bytes
        self._largest = 0
        #: Bytes of those in memory, the earliest first, without the one that a cell is reading; of those that left it.
        self._held: dict[Key, int] = {}
        self._away: dict[Key, int] = {}
        self._bytes = 0

    def put(self, key: Key, nbytes: int) -> list[Action]:
        """Adds what a forward has made."""
        self._largest = max(self._largest, nbytes)
        return self._hold(key, nbytes)

    def prefetch(self, key: Key) -> list[Action]:
        """Reads a spilled boundary back, for the next cell."""
        if key not in self._away:
            return []
        return [*self._hold(key, self._away.pop(key)), Action(Kind.PREFETCH, *key)]

    def drop(self, key: Key) -> None:
        """Called when a cell of the backward reads a boundary, which has no further use."""
        self._bytes -= self._held.pop(key, 0)

    def _hold(self, new: Key, nbytes: int) -> list[Action]:
        """Keeps a boundary in memory, and spills others, the earliest first, if the budget is exceeded."""
        self._held[new] = nbytes
        self._bytes += nbytes
        room = max(0, self._budget_bytes - MOVING * self._largest)
        if self._bytes <= room:
            return []
        actions: list[Action] = []
        for key in [key for key, size in self._held.items() if size and key != new]:
            if self._bytes > room:
                self._away[key] = self._held.pop(key)
                self._bytes -= self._away[key]
                actions.append(Action(Kind.SPILL, *key))
        return actions
