"""Fills the memory that a choice of slots and shards in memory leaves: with boundaries, kept graphs, waiting gradients.

Each use takes as many as fit, found by bisection over replays of the step (:func:`predicted_bytes`), so bytes that one
use has freed serve the next.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.planning.residency import MOVING, Key
from offload.planning.step_model import Choice, StepModel, predicted_bytes

#: Numbers of bytes for boundaries that are tried at most.
LEVELS = 32

__all__ = ["Filling", "NothingFitsError", "least_bytes", "most_within"]


class NothingFitsError(ValueError):
    """No plan fits; ``least_bytes`` is what the smallest one takes."""

    def __init__(self, least_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the least that fits is {least_bytes:,} bytes, {least_bytes - limit_bytes:,} more")
        self.least_bytes = least_bytes


def least_bytes(model: StepModel, choice: Choice) -> int:
    """Predicted bytes with the bytes for boundaries that take least.

    Large ones are in motion in fours, so spilling them all is not always less, nor is spilling none.
    """
    given = model.given.boundary_bytes
    tried = (math.inf, *_levels(model)[: 1 + MOVING]) if given is None else (given / 2,)  # as much for their gradients
    return min(predicted_bytes(model, replace(choice, boundary_bytes=nbytes)) for nbytes in tried)


def _levels(model: StepModel) -> list[float]:
    """Bytes for boundaries, ascending: all are spilled; then those in motion and one after the other stay."""
    if not model.spills:
        return [0.0]
    sizes = model.sizes
    each = [sizes.boundaries((j, i)) for j in range(1, model.shards) for i in range(len(sizes.rows))]
    total, moving = sum(each), MOVING * max(each, default=0)
    step = max(min((nbytes for nbytes in each if nbytes), default=1), math.ceil(total / LEVELS))
    return [0.0, *(float(moving + nbytes) for nbytes in range(step, total + step, step))]


def _order_of_graphs(model: StepModel) -> list[Key]:
    """The cells whose graphs may be kept, those that backward begins with first."""
    return [(j, i) for j in range(model.shards - 1, model.first - 1, -1) for i in range(len(model.sizes.rows))]


def most_within(
    sums: Sequence[float],
    nbytes: Callable[[int], int],
    limit_bytes: float,
    least: float,
    guess: float | None = None,
    unfilled: float = 0,
) -> int:
    """The largest number whose ``nbytes``, which grow with it, are within a limit.

    Args:
        sums: for each number, from 0, bytes of so many things. ``nbytes`` grow by about as much, so the next number to
            try is extrapolated from the last.
        nbytes, limit_bytes: of a number, and the most.
        least: ``nbytes`` of 0, which are within the limit.
        guess: ``sums`` of the number that is tried first.
        unfilled: bytes below the limit that are near enough to it.
    """
    low, high = 0, len(sums)
    target = sums[0] + limit_bytes - least if guess is None else guess
    tries = 0
    while high - low > 1:
        tries += 1
        middle = max(low + 1, bisect_right(sums, target, low + 1, high) - 1)
        if not tries % 3:  # the extrapolation was far off
            middle = (low + high) // 2
        found = nbytes(middle)
        target = sums[middle] + limit_bytes - found
        if found <= limit_bytes:
            low = middle
            if unfilled and found >= limit_bytes - unfilled:
                break
        else:
            high = middle
    return low


class Filling:
    """Fills the memory of one search.

    Args:
        model: what is known about the steps.
        limit_bytes: the most that a step may take.
        whole_limit_bytes: the same for a plan in which nothing moves and nothing is recomputed.
        most_plans: replays after whose half fewer numbers of boundaries are tried.
        unfilled_bytes: bytes below the limit that are near enough to it.
    """

    def __init__(
        self,
        model: StepModel,
        limit_bytes: float,
        whole_limit_bytes: float,
        *,
        most_plans: int,
        unfilled_bytes: float,
    ) -> None:
        self._model = model
        self._limit = limit_bytes
        self._whole_limit = whole_limit_bytes
        self._most_plans = most_plans
        self._unfilled = unfilled_bytes
        self.graphs = _order_of_graphs(model)
        self.levels = _levels(model)
        self._graph_sums = [0, *itertools.accumulate(map(self.graph_bytes, self.graphs))]
        self._bytes: dict[Choice, int] = {}
        #: Of the last choice: its bytes without graphs, and those of its graphs by ``_graph_sums``.
        self._last_filled: tuple[int, float] | None = None
        #: The same without boundaries, and of boundaries.
        self._last_spilled: tuple[int, float] | None = None
        #: Number of plans that were made.
        self.tried = 0

    def memory(self, choice: Choice) -> int:
        """Predicted bytes; computed once."""
        if choice not in self._bytes:
            self.tried += 1
            self._bytes[choice] = predicted_bytes(self._model, choice)
        return self._bytes[choice]

    def fits(self, choice: Choice) -> bool:
        """Whether a choice is within the limit."""
        return self.memory(choice) <= self._limit

    def fill(self, choice: Choice) -> Choice | None:
        """Boundaries stay where they fit, then as many graphs as fit are kept; None if no plan fits."""
        given = self._model.given
        if given.boundary_bytes is not None:
            choice = replace(choice, boundary_bytes=given.boundary_bytes / 2)  # as much for their gradients
        if not self.fits(choice):
            fewer = None if given.boundary_bytes is not None else self._with_fewer_boundaries(choice)
            if fewer is None:
                return None
            choice = fewer
        return self.with_graphs(choice)

    def with_graphs(self, choice: Choice) -> Choice:
        """As many graphs as fit beside a choice that fits."""
        given, least, sums = self._model.given, self.memory(choice), self._graph_sums
        if given.graph_bytes is not None:
            sums = [nbytes for nbytes in sums if nbytes <= given.graph_bytes]

        def keeping(count: int) -> Choice:
            return replace(choice, kept=frozenset(self.graphs[:count]))

        guess = None if self._last_filled is None else sum(self._last_filled) - least
        kept = most_within(sums, lambda count: self.memory(keeping(count)), self._limit, least, guess, self._unfilled)
        self._last_filled = least, sums[kept]
        return keeping(kept)

    def _with_fewer_boundaries(self, choice: Choice) -> Choice | None:
        """As many bytes for boundaries as fit; None if no number does."""
        levels = self.levels

        def spilling(level: int) -> Choice:
            return replace(choice, boundary_bytes=levels[level])

        found, least = -1, self.memory(spilling(0))
        if least <= self._limit:
            guess = None if self._last_spilled is None else sum(self._last_spilled) - least
            found = most_within(
                levels, lambda level: self.memory(spilling(level)), self._limit, least, guess, self._unfilled
            )
        # A boundary that stays is not in motion, so a few more of them may take less memory.
        more = MOVING if self.tried < self._most_plans // 2 else 0
        for level in range(found + 2, min(found + 2 + more, len(levels))):
            if self.fits(spilling(level)):
                found = level
        if found < 0:
            return None
        self._last_spilled = least, levels[found]
        return spilling(found)

    def graph_bytes(self, cell: Key) -> int:
        """Bytes of a kept graph, without the cell's input."""
        (j, i), sizes = cell, self._model.sizes
        if j not in sizes.kept_profiles and j in sizes.graph_bytes_per_row:
            return int(sizes.graph_bytes_per_row[j] * sizes.rows[i])
        profile = sizes.kept_profiles.get(j) or sizes.memory_profiles.get(j)
        return 0 if profile is None else profile.kept_bytes(sizes.rows[i])

    def without_recipes(self, choice: Choice) -> Choice:
        """Whole graphs, where all of them fit and nothing else can use the memory: recipes take time for operations.

        On the CPU every shard is in memory then; a device waits for the host, which finds and keeps the recipes.
        """
        whole = replace(choice, cheap_recompute=False)
        in_use = self._model.host_bytes is None and len(choice.in_memory) < self._model.shards
        if in_use or len(choice.kept) < len(self.graphs):
            return choice
        return whole if self.memory(whole) <= self._whole_limit else choice

    def with_waiting(self, choice: Choice) -> Choice:
        """The gradients of the first shards wait in memory, as many as fit: these are updated first."""
        model = self._model
        if not model.gradients_wait:
            return choice
        away = [j for j in range(model.first, model.shards) if j not in choice.in_memory | model.in_host]

        for most in (model.given.gradient_bytes, model.host_bytes):
            if most is not None:
                total = itertools.accumulate(model.sizes.gradient_bytes[j] for j in away)
                away = away[: sum(nbytes <= most for nbytes in total)]

        def waiting(count: int) -> Choice:
            return replace(choice, waiting=frozenset(away[:count]))

        sums = [0, *itertools.accumulate(model.sizes.gradient_bytes[j] for j in away)]
        least = self.memory(choice)
        if least > self._limit:
            return choice
        return waiting(
            most_within(sums, lambda count: self.memory(waiting(count)), self._limit, least, unfilled=self._unfilled)
        )
