"""Searches the fastest plan of a step that fits in a number of bytes.

A plan is described by a :class:`Choice`: how many slots there are, which shards rest in memory, which cells keep their
graphs, how many bytes boundaries get, and whose gradients wait in memory for their update. Each candidate is planned,
simulated, and its memory replayed at every moment of the step, so bytes that are free when others are needed are used
twice: gradients that wait for an update take the place of graphs that backward has freed.

Candidates differ in slots and in shards in memory. For each, as many graphs are kept as fit, found by bisection; a
bound from below (compute, reads, writes, of which the slowest counts) skips those that cannot be the fastest. Where the
recomputation of a cell hides behind a load, its graph saves nothing, and the simulation shows it. From the fastest
candidate on, bytes of one use are exchanged for another as long as a step becomes faster: other shards in memory, one
more or less, other slots, more or fewer boundaries, graphs that leave for gradients that wait.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.planning.residency import MOVING, Key
from offload.planning.step_model import (
    Choice,
    Prediction,
    StepModel,
    costs_of,
    predict,
    predicted_bytes,
    predicted_seconds,
)

#: Plans after which nothing finer is tried, nor exchanged; more where all of them have no more than so many cells.
MOST_PLANS, MOST_CELLS = 70, 1800
#: With more cells than so many, fewer plans; graphs and boundaries fill the memory but for one part in so many; and so
#: many parts of the shards are tried in memory first.
MANY_CELLS, FEWER_PLANS, UNFILLED_SHARE = 80, 30, 128
PARTS_IN_MEMORY, FEWER_PARTS = 4, 2
#: Least gain for which a choice is exchanged for another; and for one more slot, whose memory is held all the time, or
#: for fewer graphs, each of which saves a recomputation whatever else was measured.
LEAST_GAIN, LEAST_LARGE_GAIN = 1e-6, 5e-3
#: Numbers of bytes for boundaries that are tried at most.
LEVELS = 32

__all__ = ["Found", "NothingFitsError", "fill", "least_bytes", "search"]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Prediction
    #: The fastest candidate with other slots or other shards in memory.
    runner_up: Prediction | None
    #: Number of plans that were made.
    tried: int


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
    cells = ((j, i) for j in range(model.shards - 1, model.first - 1, -1) for i in range(len(model.sizes.rows)))
    return [cell for cell in cells if cell not in model.always_kept]


def _most(
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


def fill(model: StepModel, choice: Choice, limit_bytes: float, whole_limit_bytes: float | None = None) -> Choice:
    """Adds the boundaries, kept graphs and waiting gradients that fit to the slots and shards in memory of ``choice``.

    Raises:
        NothingFitsError: if the step does not fit without any of them.
    """
    found = _Search(model, limit_bytes, whole_limit_bytes)
    filled = found.fill(replace(choice, kept=frozenset(), waiting=frozenset(), boundary_bytes=math.inf))
    if filled is None:
        least = least_bytes(model, replace(choice, kept=frozenset(), waiting=frozenset()))
        raise NothingFitsError(least, int(limit_bytes))
    return found.without_recipes(found.exchanged(filled, moves=False)[1])


def search(model: StepModel, limit_bytes: float, whole_limit_bytes: float | None = None) -> Found:
    """The fastest plan whose memory never exceeds ``limit_bytes``.

    Args:
        model: what is known about the steps.
        limit_bytes: the most that a step may take.
        whole_limit_bytes: the same for the plan in which nothing moves and nothing is recomputed; if None, as much.

    Raises:
        NothingFitsError: if no plan fits.
    """
    return _Search(model, limit_bytes, whole_limit_bytes).run()


class _Search:
    def __init__(self, model: StepModel, limit_bytes: float, whole_limit_bytes: float | None) -> None:
        self._model = model
        self._limit = limit_bytes
        self._whole_limit = limit_bytes if whole_limit_bytes is None else whole_limit_bytes
        self._graphs = _order_of_graphs(model)
        self._levels = _levels(model)
        self._graph_sums = [0, *itertools.accumulate(map(self._graph_bytes, self._graphs))]
        #: In the order of a forward: the first shards of a step have nothing to hide their loads behind.
        self._may_rest = sorted(model.resting_bytes)
        #: Seconds and choice of each number of slots and of shards in memory; None if none fits or can be the fastest.
        self._found: dict[tuple[int, int], tuple[float, Choice] | None] = {}
        self._best = math.inf
        self._bytes: dict[Choice, int] = {}
        #: Of the last choice: its bytes without graphs, and those of its graphs by ``_graph_sums``.
        self._last_filled: tuple[int, float] | None = None
        #: The same without boundaries, and of boundaries.
        self._last_spilled: tuple[int, float] | None = None
        self._tried = 0
        cells = model.shards * len(model.sizes.rows)
        many = cells > MANY_CELLS
        self._most_plans = FEWER_PLANS if many else max(MOST_PLANS, MOST_CELLS // cells)
        self._unfilled = limit_bytes / UNFILLED_SHARE if many else 0.0
        self._parts_in_memory = FEWER_PARTS if many else PARTS_IN_MEMORY

    def run(self) -> Found:
        """Tries slots, and for each coarsely, then finely, numbers of shards in memory."""
        model = self._model
        given = model.given.slots
        counts = (model.least_slots, model.least_slots + 1) if given is None else (given,)
        for slots in sorted({self._slots(0, count) for count in counts}):
            self._try_numbers_in_memory(slots)
        ranked = sorted((found for found in self._found.values() if found is not None), key=lambda found: found[0])
        if not ranked:
            least = least_bytes(model, Choice(self._slots(0, model.least_slots)))
            raise NothingFitsError(least, int(self._limit))
        choice = self.exchanged(ranked[0][1], moves=True)[1]
        where = choice.slots, choice.in_memory
        others = (other for _, other in ranked if (other.slots, other.in_memory) != where)
        second = next((self.with_waiting(other) for other in others), None)
        best = predict(model, self.without_recipes(choice))
        return Found(best, None if second is None else predict(model, second), self._tried)

    def _slots(self, in_memory: int, slots: int) -> int:
        return min(slots, self._model.shards - in_memory)

    def _memory(self, choice: Choice) -> int:
        if choice not in self._bytes:
            self._tried += 1
            self._bytes[choice] = predicted_bytes(self._model, choice)
        return self._bytes[choice]

    def _fits(self, choice: Choice) -> bool:
        return self._memory(choice) <= self._limit

    def _try_numbers_in_memory(self, slots: int) -> None:
        """Seconds first fall with the number of shards in memory, then rise as graphs have to leave for them."""
        total = [0, *itertools.accumulate(self._resting_bytes(j) for j in self._may_rest)]
        if self._model.given.resident_bytes is not None:
            self._best_of(slots, [sum(nbytes <= self._model.given.resident_bytes for nbytes in total[1:])])
            return
        least = self._least_with(slots, 0)
        if least > self._limit:
            total = [0]
        most = _most(total, lambda count: self._least_with(slots, count), self._limit, least, unfilled=self._unfilled)
        step = max(1, most // self._parts_in_memory)
        best = self._best_of(slots, [*range(0, most + 1, step), most])
        while step > 1 and best is not None and self._tried < self._most_plans:
            step = max(1, step // 2)
            best = self._best_of(slots, [k for k in (best - step, best, best + step) if 0 <= k <= most])

    def _best_of(self, slots: int, counts: Sequence[int]) -> int | None:
        """Tries numbers of shards in memory; returns the fastest of them."""
        for count in counts:
            key = (self._slots(count, slots), count)
            if key not in self._found:
                self._found[key] = self._fastest(*key)
        tried = [(found[0], count) for count in counts if (found := self._found[self._slots(count, slots), count])]
        return min(tried)[1] if tried else None

    def _resting_bytes(self, j: int) -> int:
        return self._model.resting_bytes[j] + self._model.sizes.gradient_bytes[j]

    def _least_with(self, slots: int, count: int) -> int:
        choice = Choice(self._slots(count, slots), self._first(count))
        least = math.inf
        few = self._levels[: 1 + MOVING if self._tried < self._most_plans // 2 else 1]
        for nbytes in (math.inf, *few):
            least = min(least, self._memory(replace(choice, boundary_bytes=nbytes)))
            if least <= self._limit:
                break
        return int(least)

    def _first(self, count: int) -> frozenset[int]:
        return frozenset(self._may_rest[:count])

    def _spread(self, count: int) -> frozenset[int]:
        """Evenly over the shards: cells of those in memory hide the loads of the others."""
        return frozenset(self._may_rest[k * len(self._may_rest) // count] for k in range(count))

    def _fastest(self, slots: int, count: int) -> tuple[float, Choice] | None:
        choice = self.fill(Choice(slots, self._first(count)))
        if choice is None:
            return None
        return self._seconds(choice), choice

    def _seconds(self, choice: Choice) -> float:
        seconds = predicted_seconds(self._model, choice)
        self._best = min(self._best, seconds)
        return seconds

    def exchanged(self, choice: Choice, *, moves: bool) -> tuple[float, Choice]:
        """Gives bytes of one use to another as long as a step becomes faster; ``moves``: also slots and shards."""
        choice = self.with_waiting(choice)
        best, seen = (self._seconds(choice), choice), {choice}
        better = True
        while better:
            better = False
            for other in self._exchanges(best[1], moves=moves):
                if self._tried >= self._most_plans:
                    return best
                if other is None or (filled := self.with_waiting(other)) in seen:
                    continue
                seen.add(filled)
                seconds, now = self._seconds(filled), best[1]
                worse = filled.slots > now.slots or len(filled.kept) < len(now.kept)
                gain = LEAST_LARGE_GAIN if worse and filled.in_memory == now.in_memory else LEAST_GAIN
                if seconds < best[0] * (1 - gain):
                    best, better = (seconds, filled), True
                    break
        return best

    def _exchanges(self, choice: Choice, *, moves: bool) -> Iterator[Choice | None]:
        """The neighbours of a choice, without gradients that wait, those first that gain most often."""
        bare, given = replace(choice, waiting=frozenset()), self._model.given
        if moves and given.resident_bytes is None:
            count, slots = len(choice.in_memory), max(choice.slots, given.slots or self._model.least_slots)
            for other in dict.fromkeys((count, count + 1, count - 1, len(self._may_rest))):
                for in_memory in (self._first(other), self._spread(other)) if 0 <= other <= len(self._may_rest) else ():
                    if in_memory != choice.in_memory:
                        yield self.fill(Choice(self._slots(other, slots), in_memory))
        if moves and given.slots is None:
            for slots in (choice.slots + 1, choice.slots - 1):
                if self._model.least_slots <= slots <= self._slots(len(choice.in_memory), slots):
                    yield self.fill(Choice(slots, choice.in_memory))
        if given.boundary_bytes is None and self._model.spills:
            levels, empty = [*self._levels, math.inf], replace(bare, kept=frozenset())
            at = bisect_right(levels, choice.boundary_bytes) - 1
            for level in dict.fromkeys((len(levels) - 1, *range(at + 1, at + 1 + MOVING), at - 1, 0)):
                if 0 <= level < len(levels) and level != at:
                    spilling = replace(empty, boundary_bytes=levels[level])
                    yield self._with_graphs(spilling) if self._fits(spilling) else None
        kept = [cell for cell in self._graphs if cell in choice.kept]
        if self._model.gradients_wait:
            for count in dict.fromkeys((len(kept) - 1, len(kept) // 2, 0)):
                if 0 <= count < len(kept):
                    yield replace(bare, kept=frozenset(kept[:count]))

    def fill(self, choice: Choice) -> Choice | None:
        """Boundaries stay where they fit, then as many graphs as fit are kept; None if no plan fits or can win."""
        given = self._model.given
        if given.boundary_bytes is not None:
            choice = replace(choice, boundary_bytes=given.boundary_bytes / 2)  # as much for their gradients
        if self._cannot_win(choice):
            return None
        if not self._fits(choice):
            fewer = None if given.boundary_bytes is not None else self._with_fewer_boundaries(choice)
            if fewer is None:
                return None
            choice = fewer
        return self._with_graphs(choice)

    def _with_graphs(self, choice: Choice) -> Choice:
        """As many graphs as fit beside a choice that fits."""
        given, least, sums = self._model.given, self._memory(choice), self._graph_sums
        if given.graph_bytes is not None:
            sums = [nbytes for nbytes in sums if nbytes <= given.graph_bytes]

        def keeping(count: int) -> Choice:
            return replace(choice, kept=frozenset(self._graphs[:count]))

        guess = None if self._last_filled is None else sum(self._last_filled) - least
        kept = _most(sums, lambda count: self._memory(keeping(count)), self._limit, least, guess, self._unfilled)
        self._last_filled = least, sums[kept]
        return keeping(kept)

    def _with_fewer_boundaries(self, choice: Choice) -> Choice | None:
        """As many bytes for boundaries as fit; None if no number does."""
        levels = self._levels

        def spilling(level: int) -> Choice:
            return replace(choice, boundary_bytes=levels[level])

        found, least = -1, self._memory(spilling(0))
        if least <= self._limit:
            guess = None if self._last_spilled is None else sum(self._last_spilled) - least
            found = _most(
                levels, lambda level: self._memory(spilling(level)), self._limit, least, guess, self._unfilled
            )
        # A boundary that stays is not in motion, so a few more of them may take less memory.
        more = MOVING if self._tried < self._most_plans // 2 else 0
        for level in range(found + 2, min(found + 2 + more, len(levels))):
            if self._fits(spilling(level)):
                found = level
        if found < 0:
            return None
        self._last_spilled = least, levels[found]
        return spilling(found)

    def _cannot_win(self, choice: Choice) -> bool:
        """Whether a plan takes longer than one that was found, even with as many graphs as its bytes allow."""
        if self._best == math.inf:
            return False
        model, costs = self._model, costs_of(self._model, choice)
        away = set(range(model.shards)) - choice.in_memory
        resting = sum(model.resting_bytes[j] for j in choice.in_memory)
        held = model.margin_bytes + model.sizes.constant_bytes + resting + choice.slots * model.sizes.slot_bytes
        left = self._limit - held
        # The cells that save most by their graphs, as if each took as little as the smallest graph.
        smallest = min((self._graph_bytes(cell) for cell in self._graphs), default=0)
        most = len(self._graphs) if smallest <= 0 else max(0, int(left // smallest))
        saved = sorted((costs.backward[j] - costs.kept_backward[j] for j, _ in self._graphs), reverse=True)
        cells = [*self._graphs, *model.always_kept]
        compute = sum(costs.backward[j] for j, _ in cells) - sum(saved[:most])
        compute += len(model.sizes.rows) * sum(costs.forward)
        reads = sum(costs.load[j] for j in away)
        writes = 0.0 if model.gradients_wait else sum(costs.drain)
        return max(compute, reads, writes) > self._best

    def _graph_bytes(self, cell: Key) -> int:
        """Bytes of a kept graph, without the cell's input."""
        (j, i), sizes = cell, self._model.sizes
        if j not in sizes.kept_profiles and j in sizes.graph_bytes_per_row:
            return int(sizes.graph_bytes_per_row[j] * sizes.rows[i])
        profile = sizes.kept_profiles.get(j) or sizes.memory_profiles.get(j)
        return 0 if profile is None else profile.kept_bytes(sizes.rows[i])

    def without_recipes(self, choice: Choice) -> Choice:
        """Whole graphs, where all of them fit and every shard is in memory: recipes take time for each operation."""
        whole = replace(choice, cheap_recompute=False)
        if len(choice.in_memory) < self._model.shards or len(choice.kept) < len(self._graphs):
            return choice
        return whole if self._memory(whole) <= self._whole_limit else choice

    def with_waiting(self, choice: Choice) -> Choice:
        """The gradients of the first shards wait in memory, as many as fit: these are updated first."""
        model = self._model
        if not model.gradients_wait:
            return choice
        away = [j for j in range(model.first, model.shards) if j not in choice.in_memory]

        if model.given.gradient_bytes is not None:
            total = [*itertools.accumulate(model.sizes.gradient_bytes[j] for j in away)]
            away = away[: sum(nbytes <= model.given.gradient_bytes for nbytes in total)]

        def waiting(count: int) -> Choice:
            return replace(choice, waiting=frozenset(away[:count]))

        sums = [0, *itertools.accumulate(model.sizes.gradient_bytes[j] for j in away)]
        least = self._memory(choice)
        if least > self._limit:
            return choice
        return waiting(
            _most(sums, lambda count: self._memory(waiting(count)), self._limit, least, unfilled=self._unfilled)
        )
