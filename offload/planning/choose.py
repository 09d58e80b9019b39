"""Chooses what uses the memory of a step, within a number of bytes.

Bytes go first to whole shards that rest in memory, with gradients and optimizer states: each saves two loads, a write
and an update in files. What is left goes to graphs, which save a recomputation, those first that backward begins with.
The rest goes to another slot, to gradients that wait for their update, and to boundaries that stay, in the order of the
seconds that each saves for a byte.

How many of each fit is found by bisection over replays of the step (:func:`predicted_bytes`), so bytes that one use has
freed serve the next. Times change nothing but the last kinds, and none of them changes a result.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from offload.planning.residency import MOVING
from offload.planning.step_model import Choice, StepModel, predicted_bytes, predicted_seconds

__all__ = ["NothingFitsError", "choose", "fill", "least_bytes"]

#: Numbers of bytes for boundaries that are tried at most.
LEVELS = 32
#: Least gain, of the seconds of a step, for which there is another slot: its memory is held all the time.
LEAST_GAIN = 5e-3
#: Part of a step by which sums of the same seconds in other orders differ at most.
ROUNDING = 1e-9

#: Adds one use of memory to a choice as far as it fits.
_Use = Callable[[StepModel, Choice, Callable[[Choice], bool]], Choice]


class NothingFitsError(ValueError):
    """No plan fits; ``least_bytes`` is what the smallest one takes."""

    def __init__(self, least_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the least that fits is {least_bytes:,} bytes, {least_bytes - limit_bytes:,} more")
        self.least_bytes = least_bytes


def choose(model: StepModel, limit_bytes: int) -> Choice:
    """Slots, shards in memory and what else fits in ``limit_bytes``. Raises NothingFitsError if nothing does."""
    movable, given = sorted(model.resting_bytes), model.given
    if given.resident_bytes is not None:
        total = itertools.accumulate(model.resting_bytes[j] + model.sizes.gradient_bytes[j] for j in movable)
        movable = movable[: sum(nbytes <= given.resident_bytes for nbytes in total)]
    slots = given.slots or model.least_slots

    def resting(count: int) -> Choice:
        """With the first shards in memory: in a forward they have nothing to hide their loads behind."""
        return Choice(min(slots, model.shards - count), frozenset(movable[:count]))

    def fits(count: int) -> bool:
        return least_bytes(model, resting(count), limit_bytes) <= limit_bytes

    if fits(len(movable)):  # without slots and buffers it may take less than with one shard fewer
        return fill(model, resting(len(movable)), limit_bytes, resizes=True)
    return fill(model, resting(_most(fits, len(movable) - 1)), limit_bytes, resizes=True)


def fill(model: StepModel, choice: Choice, limit_bytes: int, *, resizes: bool = False) -> Choice:
    """Adds what fits to the slots and shards in memory of ``choice``; ``resizes``: also slots.

    Raises NothingFitsError if the step does not fit without any of it.
    """
    bare = replace(choice, kept=frozenset(), waiting=frozenset())
    now = _least(model, bare, limit_bytes)
    if predicted_bytes(model, now) > limit_bytes:
        raise NothingFitsError(predicted_bytes(model, now), limit_bytes)

    def fits(tried: Choice) -> bool:
        return predicted_bytes(model, tried) <= limit_bytes

    now = _with_graphs(model, now, fits)
    uses: list[_Use] = [_with_waiting, _with_boundaries]
    if resizes and model.given.slots is None:
        uses.append(_with_a_slot)
    while uses:
        before, seconds = predicted_bytes(model, now), predicted_seconds(model, now)
        tried = [(use, use(model, now, fits)) for use in uses]
        ranked: list[tuple[float, int, _Use, Choice]] = []
        for use, other in tried:
            saved = seconds - predicted_seconds(model, other)
            least = (LEAST_GAIN if use is _with_a_slot else -ROUNDING) * seconds
            if other != now and saved >= least:
                ranked.append((saved / max(1, predicted_bytes(model, other) - before), -len(ranked), use, other))
        if not ranked:
            break
        _, _, used, now = max(ranked, key=lambda each: each[:2])
        uses.remove(used)
    return now


def least_bytes(model: StepModel, choice: Choice, enough: float = 0) -> int:
    """Predicted bytes with the bytes for boundaries that take least; or with the first that take no more than enough.

    Large ones are in motion in fours, so spilling them all is not always less, nor is spilling none.
    """
    return predicted_bytes(model, _least(model, choice, enough))


def _least(model: StepModel, choice: Choice, enough: float) -> Choice:
    given, found, least = model.given.boundary_bytes, choice, math.inf
    tried = (*_levels(model)[: 1 + MOVING], math.inf) if given is None else (given / 2,)  # as much for their gradients
    for nbytes in tried:
        other = replace(choice, boundary_bytes=nbytes)
        if (taken := predicted_bytes(model, other)) < least:
            found, least = other, taken
        if least <= enough:
            break
    return found


def _levels(model: StepModel) -> list[float]:
    """Bytes for boundaries, ascending: all are spilled; then those in motion and one after the other stay."""
    if not model.spills:
        return [math.inf]
    sizes = model.sizes
    each = [sizes.boundaries((j, i)) for j in range(1, model.shards) for i in range(len(sizes.rows))]
    total, moving = sum(each), MOVING * max(each, default=0)
    step = max(min((nbytes for nbytes in each if nbytes), default=1), math.ceil(total / LEVELS))
    return [0.0, *(float(moving + nbytes) for nbytes in range(step, total + step, step)), math.inf]


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 where none does, or none but that."""
    low, high = 0, max(most, 0) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_graphs(model: StepModel, choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    cells = [(j, i) for j in range(model.shards - 1, model.first - 1, -1) for i in range(len(model.sizes.rows))]
    if model.given.graph_bytes is not None:
        total = itertools.accumulate(map(model.sizes.bytes_of_graph, cells))
        cells = cells[: sum(nbytes <= model.given.graph_bytes for nbytes in total)]

    def keeping(count: int) -> Choice:
        return replace(choice, kept=frozenset(cells[:count]))

    return keeping(_most(lambda count: fits(keeping(count)), len(cells)))


def _with_waiting(model: StepModel, choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    """The gradients of the first shards wait, which are updated first."""
    if not model.gradients_wait:
        return choice
    away = [j for j in range(model.first, model.shards) if j not in choice.in_memory | model.in_host]
    for most in (model.given.gradient_bytes, model.host_bytes):
        if most is not None:
            total = itertools.accumulate(model.sizes.gradient_bytes[j] for j in away)
            away = away[: sum(nbytes <= most for nbytes in total)]

    def waiting(count: int) -> Choice:
        return replace(choice, waiting=frozenset(away[:count]))

    return waiting(_most(lambda count: fits(waiting(count)), len(away)))


def _with_boundaries(model: StepModel, choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    if model.given.boundary_bytes is not None or not model.spills:
        return choice

    def staying() -> Iterator[Choice]:
        for nbytes in reversed(_levels(model)):
            if nbytes > choice.boundary_bytes:
                yield replace(choice, boundary_bytes=nbytes)

    return next(filter(fits, staying()), choice)


def _with_a_slot(model: StepModel, choice: Choice, fits: Callable[[Choice], bool]) -> Choice:
    more = replace(choice, slots=min(choice.slots + 1, model.shards - len(choice.in_memory)))
    return more if more != choice and fits(more) else choice
