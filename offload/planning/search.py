"""Searches the fastest plan of a step that fits in a number of bytes.

A plan is described by a :class:`Choice`: how many slots there are, which shards rest in memory, which cells keep their
graphs, how many bytes boundaries get, and whose gradients wait in memory for their update. Each candidate is planned,
simulated, and its memory replayed at every moment of the step, so bytes that are free when others are needed are used
twice: gradients that wait for an update take the place of graphs that backward has freed.

Candidates differ in slots and in shards in memory. Each fills what it leaves (:mod:`offload.planning.filling`); a
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.planning.filling import Filling, NothingFitsError, least_bytes, most_within
from offload.planning.residency import MOVING
from offload.planning.step_model import Choice, Prediction, StepModel, costs_of, predict, predicted_seconds

#: Plans after which nothing finer is tried, nor exchanged; more where all of them have no more than so many cells.
MOST_PLANS, MOST_CELLS = 70, 1800
#: With more cells than so many, fewer plans; graphs and boundaries fill the memory but for one part in so many; and so
#: many parts of the shards are tried in memory first.
MANY_CELLS, FEWER_PLANS, UNFILLED_SHARE = 80, 30, 128
PARTS_IN_MEMORY, FEWER_PARTS = 4, 2
#: Least gain for which a choice is exchanged for another; and for one more slot, whose memory is held all the time, or
#: for fewer graphs, each of which saves a recomputation whatever else was measured.
LEAST_GAIN, LEAST_LARGE_GAIN = 1e-6, 5e-3

__all__ = ["Found", "fill", "search"]


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Prediction
    #: The fastest candidate with other slots or other shards in memory.
    runner_up: Prediction | None
    #: Number of plans that were made.
    tried: int


def fill(model: StepModel, choice: Choice, limit_bytes: float, whole_limit_bytes: float | None = None) -> Choice:
    """Adds the boundaries, kept graphs and waiting gradients that fit to the slots and shards in memory of ``choice``.

    Raises:
        NothingFitsError: if the step does not fit without any of them.
    """
    found = _Search(model, limit_bytes, whole_limit_bytes)
    filled = found.filling.fill(replace(choice, kept=frozenset(), waiting=frozenset(), boundary_bytes=math.inf))
    if filled is None:
        least = least_bytes(model, replace(choice, kept=frozenset(), waiting=frozenset()))
        raise NothingFitsError(least, int(limit_bytes))
    return found.filling.without_recipes(found.exchanged(filled, moves=False)[1])


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
        cells = model.shards * len(model.sizes.rows)
        many = cells > MANY_CELLS
        self._most_plans = FEWER_PLANS if many else max(MOST_PLANS, MOST_CELLS // cells)
        self._unfilled = limit_bytes / UNFILLED_SHARE if many else 0.0
        self._parts_in_memory = FEWER_PARTS if many else PARTS_IN_MEMORY
        self.filling = Filling(
            model,
            limit_bytes,
            limit_bytes if whole_limit_bytes is None else whole_limit_bytes,
            most_plans=self._most_plans,
            unfilled_bytes=self._unfilled,
        )
        #: In the order of a forward: the first shards of a step have nothing to hide their loads behind.
        self._may_rest = sorted(model.resting_bytes)
        #: Seconds and choice of each number of slots and of shards in memory; None if none fits or can be the fastest.
        self._found: dict[tuple[int, int], tuple[float, Choice] | None] = {}
        self._best = math.inf

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
        second = next((self.filling.with_waiting(other) for other in others), None)
        best = predict(model, self.filling.without_recipes(choice))
        return Found(best, None if second is None else predict(model, second), self.filling.tried)

    def _slots(self, in_memory: int, slots: int) -> int:
        return min(slots, self._model.shards - in_memory)

    def _try_numbers_in_memory(self, slots: int) -> None:
        """Seconds first fall with the number of shards in memory, then rise as graphs have to leave for them."""
        total = [0, *itertools.accumulate(self._resting_bytes(j) for j in self._may_rest)]
        if self._model.given.resident_bytes is not None:
            self._best_of(slots, [sum(nbytes <= self._model.given.resident_bytes for nbytes in total[1:])])
            return
        least = self._least_with(slots, 0)
        if least > self._limit:
            total = [0]
        most = most_within(
            total, lambda count: self._least_with(slots, count), self._limit, least, unfilled=self._unfilled
        )
        step = max(1, most // self._parts_in_memory)
        best = self._best_of(slots, [*range(0, most + 1, step), most])
        while step > 1 and best is not None and self.filling.tried < self._most_plans:
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
        few = self.filling.levels[: 1 + MOVING if self.filling.tried < self._most_plans // 2 else 1]
        for nbytes in (math.inf, *few):
            least = min(least, self.filling.memory(replace(choice, boundary_bytes=nbytes)))
            if least <= self._limit:
                break
        return int(least)

    def _first(self, count: int) -> frozenset[int]:
        return frozenset(self._may_rest[:count])

    def _spread(self, count: int) -> frozenset[int]:
        """Evenly over the shards: cells of those in memory hide the loads of the others."""
        return frozenset(self._may_rest[k * len(self._may_rest) // count] for k in range(count))

    def _fill(self, choice: Choice) -> Choice | None:
        return None if self._cannot_win(choice) else self.filling.fill(choice)

    def _fastest(self, slots: int, count: int) -> tuple[float, Choice] | None:
        choice = self._fill(Choice(slots, self._first(count)))
        if choice is None:
            return None
        return self._seconds(choice), choice

    def _seconds(self, choice: Choice) -> float:
        seconds = predicted_seconds(self._model, choice)
        self._best = min(self._best, seconds)
        return seconds

    def exchanged(self, choice: Choice, *, moves: bool) -> tuple[float, Choice]:
        """Gives bytes of one use to another as long as a step becomes faster; ``moves``: also slots and shards."""
        choice = self.filling.with_waiting(choice)
        best, seen = (self._seconds(choice), choice), {choice}
        better = True
        while better:
            better = False
            for other in self._exchanges(best[1], moves=moves):
                if self.filling.tried >= self._most_plans:
                    return best
                if other is None or (filled := self.filling.with_waiting(other)) in seen:
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
                        yield self._fill(Choice(self._slots(other, slots), in_memory))
        if moves and given.slots is None:
            for slots in (choice.slots + 1, choice.slots - 1):
                if self._model.least_slots <= slots <= self._slots(len(choice.in_memory), slots):
                    yield self._fill(Choice(slots, choice.in_memory))
        if given.boundary_bytes is None and self._model.spills:
            levels, empty = [*self.filling.levels, math.inf], replace(bare, kept=frozenset())
            at = bisect_right(levels, choice.boundary_bytes) - 1
            for level in dict.fromkeys((len(levels) - 1, *range(at + 1, at + 1 + MOVING), at - 1, 0)):
                if 0 <= level < len(levels) and level != at:
                    spilling = replace(empty, boundary_bytes=levels[level])
                    yield self.filling.with_graphs(spilling) if self.filling.fits(spilling) else None
        kept = [cell for cell in self.filling.graphs if cell in choice.kept]
        if self._model.gradients_wait:
            for count in dict.fromkeys((len(kept) - 1, len(kept) // 2, 0)):
                if 0 <= count < len(kept):
                    yield replace(bare, kept=frozenset(kept[:count]))

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
        smallest = min((self.filling.graph_bytes(cell) for cell in self.filling.graphs), default=0)
        most = len(self.filling.graphs) if smallest <= 0 else max(0, int(left // smallest))
        saved = sorted((costs.backward[j] - costs.kept_backward[j] for j, _ in self.filling.graphs), reverse=True)
        compute = sum(costs.backward[j] for j, _ in self.filling.graphs) - sum(saved[:most])
        compute += len(model.sizes.rows) * sum(costs.forward)
        reads = sum(costs.load[j] for j in away)
        writes = 0.0 if model.gradients_wait else sum(costs.drain)
        return max(compute, reads, writes) > self._best
