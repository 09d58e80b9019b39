"""Performs the actions of a plan one by one, while the plan is being made, and records them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload.engine.boundary_store import SpillingStore
from offload.engine.cell import Cell
from offload.planning.plan import CELLS, Action, Kind, Plan
from offload.planning.planner import Pass
from offload.streaming.streamer import Streamer

if TYPE_CHECKING:
    from offload.engine.tape import Tape

__all__ = ["Follower", "ForwardActions", "performers"]


def performers(
    run: Callable[[Cell], Any],
    streamer: Streamer,
    boundaries: SpillingStore,
    gradients: SpillingStore | None = None,
) -> dict[Kind, Callable[[Any], Any]]:
    """What performs each action of a pass over offloaded shards; ``run`` performs those of cells."""
    found: dict[Kind, Callable[[Any], Any]] = dict.fromkeys(CELLS, run)
    found |= {
        Kind.LOAD: streamer.load,
        Kind.EVICT: streamer.evict,
        Kind.DRAIN: streamer.drain,
        Kind.UPDATE: streamer.update,
        Kind.UPDATE_IN_BACKWARD: streamer.update_in_backward,
        Kind.SPILL: boundaries.spill,
        Kind.PREFETCH: boundaries.prefetch,
        Kind.FORGET: boundaries.forget,
    }
    if gradients is not None:
        found[Kind.SPILL_GRADIENT] = gradients.spill
        found[Kind.PREFETCH_GRADIENT] = gradients.prefetch
        found[Kind.FORGET_GRADIENT] = gradients.forget
    return found


class Follower:
    """Performs the actions of one pass. Performers are called with the shard of an action, or with its cell."""

    def __init__(self, performers: Mapping[Kind, Callable[[Any], Any]]) -> None:
        self._performers = performers
        #: The actions that were performed.
        self.done: list[Action] = []

    def perform(self, action: Action) -> None:
        """Performs an action."""
        j, i = action.shard, action.microbatch
        self._performers[action.kind](j if i is None else Cell(j, i))
        self.done.append(action)

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Records the loads and evictions so far by new numbers of shards: from old to new, of those that differ."""
        self.done = [
            action if action.microbatch is not None else action._replace(shard=moved.get(action.shard, action.shard))
            for action in self.done
        ]

    def plan(self, this: Pass) -> Plan:
        """The plan of a pass that ran."""
        return Plan(
            tuple(self.done),
            this.slots,
            frozenset(this.resident),
            frozenset(this.pending),
            in_memory=frozenset(this.in_memory),
            grows=this.grows,
        )

    def follow(
        self,
        actions: Iterable[Action],
        visit: Callable[[int], contextlib.AbstractContextManager[object]] | None = None,
    ) -> None:
        """Performs actions; ``visit`` is a context for the cells of a shard and the boundaries that move meanwhile."""
        if visit is None:
            for action in actions:
                self.perform(action)
            return
        for j, group in itertools.groupby(_with_visits(actions), key=lambda pair: pair[0]):
            with contextlib.nullcontext() if j is None else visit(j):
                for _, action in group:
                    self.perform(action)

    def follow_cells(
        self, actions: Iterable[Action], visit: Callable[[int], contextlib.AbstractContextManager[object]]
    ) -> Generator[Any, Any, None]:
        """Performs actions whose performers of cells are generators: yields what they yield."""
        for j, group in itertools.groupby(_with_visits(actions), key=lambda pair: pair[0]):
            with contextlib.nullcontext() if j is None else visit(j):
                for _, action in group:
                    if action.kind in CELLS:
                        yield from self._performers[action.kind](Cell(action.shard, action.microbatch or 0))
                        self.done.append(action)
                    else:
                        self.perform(action)


class ForwardActions:
    """The actions of a forward, made one by one. Shards that get other numbers meanwhile are planned from then on.

    So a model's own forward may call its blocks in another order than expected: see :mod:`offload.engine.call_order`.
    """

    def __init__(self, this: Pass, tape: Tape, follower: Follower) -> None:
        #: The pass, with the numbers that shards have now.
        self.this = this
        self._tape = tape
        self._follower = follower

    def __iter__(self) -> Iterator[Action]:
        """Plans each visit when the one before it has ended."""
        moves = self.this.moves()
        for j in self.this.order:
            if self._tape.moved:
                moves = self._moves_from(j)
            yield from next(moves)
            yield from self.this.visit(j, self._tape.residency, self._tape.boundaries.nbytes)

    def _moves_from(self, j: int) -> Iterator[Sequence[Action]]:
        """Loads and evictions from shard ``j`` on, by new numbers."""
        follower, tape = self._follower, self._tape
        for moved in tape.moved:
            follower.renumber(moved)
            self.this = self.this.renumbered(moved)
        tape.moved = ()
        self.this = replace(self.this, first=tape.first, kept=tape.graphs)
        updated = {action.shard for action in follower.done if action.kind is Kind.UPDATE}
        resident = follower.plan(self.this).resident_after
        return replace(self.this, resident=resident, pending={*self.this.pending} - updated).moves(j)


def _with_visits(actions: Iterable[Action]) -> Iterator[tuple[int | None, Action]]:
    """Each action with the shard that is visited: from its first cell to the next load, eviction or drain."""
    visited: int | None = None
    for action in actions:
        if action.microbatch is None:
            visited = None
        elif action.kind in CELLS:
            visited = action.shard
        yield visited, action
