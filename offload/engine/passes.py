"""Decides which shards are in slots: the one that is used, and those that the pass will use next.

The order of a forward is that of the forward before; a backward takes the reverse of its own forward. So prefetching
needs no plan. What comes otherwise is loaded on demand.

Invariant: a shard is evicted only if it is not among the next ones to be used, as many as there are slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from offload.planning.plan import Kind
from offload.streaming.streamer import Streamer

__all__ = ["Forward", "Slots"]


class Slots:
    """The slots of one model, as the shards in them."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        #: Called with the kind and the shard of each action; None if no step is observed.
        self.act: Callable[[Kind, int], None] | None = None

    def use(self, j: int, following: Iterable[int]) -> None:
        """Makes shard ``j`` usable by compute, and begins to load those ``following``, which are used after it."""
        streamer, act = self._streamer, self.act
        shards = streamer.shards
        if streamer.slot_pool.shared:
            streamer.slot_pool.computes(streamer)
        in_place = shards[j].in_place
        if in_place and shards[j].pending is not None:
            if act is not None:
                act(Kind.UPDATE, j)
            streamer.await_update_in_place(j)
        wanted = [] if in_place else [j]
        for other in following:
            if len(wanted) >= streamer.slots:
                break
            if other not in wanted and not shards[other].in_place:
                wanted.append(other)
        for other in wanted:
            loaded = streamer.loaded
            if other not in loaded:
                if len(loaded) >= streamer.slots:
                    gone = next(k for k in loaded if k not in wanted)
                    streamer.evict(gone)
                    if act is not None:
                        act(Kind.EVICT, gone)
                if act is not None and shards[other].pending is not None:
                    act(Kind.UPDATE, other)
                streamer.load(other)
                if act is not None:
                    act(Kind.LOAD, other)
        if not in_place:
            streamer.await_load(j)


class Forward:
    """The order of the cells of one forward.

    Args:
        expected: the shards that the last one used, in order.
        returns: whether a backward follows; ``repeats``: whether the same forward of another batch does.
        common: whether what is loaded is to follow from the order of uses alone, which is the same in all processes.
    """

    def __init__(self, expected: Sequence[int], *, returns: bool, repeats: bool = False, common: bool = False) -> None:
        self._expected = expected
        self._returns, self._repeats, self._common = returns, repeats, common
        self._at = -1
        #: Whether the order of ``expected`` is a guess.
        self.guesses = False
        #: The shards so far, in the order of their use; and those of them that the backward uses.
        self.uses: list[int] = []
        self.graphed: list[int] = []

    def begin(self, j: int) -> bool:
        """Called before a cell of shard ``j``. Returns whether another shard was expected."""
        if self.uses and self.uses[-1] == j:
            return False
        self.uses.append(j)
        following, ahead = self._at + 1, range(self._at + 1, len(self._expected))
        self._at = next((k for k in ahead if self._expected[k] == j), self._at)
        return self.guesses or self._at != following

    def place(self, j: int) -> int:
        """The place of a cell of shard ``j`` among those that the backward uses."""
        return len(self.graphed) - (self.graphed[-1:] == [j])

    def add_graph(self, j: int) -> None:
        """Called when it is known that a cell of shard ``j`` has a graph."""
        if self.graphed[-1:] != [j]:
            self.graphed.append(j)

    def following(self) -> Iterator[int]:
        """The shards that are expected to be used next; then those that the backward will use."""
        rest = self._expected[self._at + 1 :]
        yield from rest
        if self._repeats:
            yield from self._expected
        elif self._returns:
            yield from reversed(rest)
            yield from reversed(self.uses if self._common else self.graphed)
