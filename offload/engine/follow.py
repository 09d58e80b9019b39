"""Performs the actions of a plan one by one, while the plan is being made, and records them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from offload.engine.cell import Cell
from offload.planning.plan import CELLS, Action, Kind

__all__ = ["Follower"]


class Follower:
    """Performs the actions of one pass.

    Args:
        performers: called with the shard of an action, or with its cell.
    """

    def __init__(self, performers: Mapping[Kind, Callable[[Any], None]]) -> None:
        self._performers = performers
        #: The actions that were performed.
        self.done: list[Action] = []

    def perform(self, action: Action) -> None:
        """Performs an action."""
        j, i = action.shard, action.microbatch
        self._performers[action.kind](j if i is None else Cell(j, i))
        self.done.append(action)

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


def _with_visits(actions: Iterable[Action]) -> Iterator[tuple[int | None, Action]]:
    """Each action with the shard that is visited: from its first cell to the next load, eviction or drain."""
    visited: int | None = None
    for action in actions:
        if action.microbatch is None:
            visited = None
        elif action.kind in CELLS:
            visited = action.shard
        yield visited, action
