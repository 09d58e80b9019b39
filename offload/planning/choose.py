"""Chooses what uses the memory of a step, within a number of bytes.

Bytes go first to whole shards that rest in memory, with gradients and optimizer states: each saves two loads, a write
and an update in files. What is left goes to graphs, which save a recomputation, those first that backward begins with.
The rest goes to gradients that wait for their update, then to boundaries that stay: for each byte both save a write and
a read. Another slot is held all the time, so it comes last, and only if steps are predicted to take less time with it.

How many of each fit is found by bisection over the bytes of a step, so bytes that one use has freed serve the next.
Times change nothing but that slot, and it changes no result.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from offload.planning.plan import Action, Kind, Plan
from offload.planning.planner import Forecast, plan_step, simulate
from offload.planning.step_bytes import StepBytes, step_bytes
from offload.planning.step_model import MOVING, Choice, StepModel

__all__ = [
    "NothingFitsError",
    "Prediction",
    "choose",
    "fill",
    "least_bytes",
    "least_limit",
    "moves",
    "predict",
    "seconds_saved",
]

#: Numbers of bytes for boundaries among which is chosen.
LEVELS = 32
#: Least gain, of the seconds of a step, for which there is another slot: its memory is held all the time.
LEAST_GAIN = 5e-3

_T = TypeVar("_T")
#: Whether a choice fits.
_Fits = Callable[[Choice], bool]


class NothingFitsError(ValueError):
    """No plan fits; ``least_bytes`` is what the smallest one takes."""

    def __init__(self, least_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the least that fits is {least_bytes:,} bytes, {least_bytes - limit_bytes:,} more")
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Prediction:
    """What a choice is predicted to cost."""

    choice: Choice
    plan: Plan
    forecast: Forecast
    peak: StepBytes
    #: From which it was made.
    model: StepModel = field(repr=False, compare=False)

    @property
    def memory_bytes(self) -> int:
        """In the memory that layers compute in, with what measured steps took more."""
        return self.peak.memory + self.model.margin_bytes

    @cached_property
    def all_stays(self) -> bool:
        """Whether nothing moves, and nothing is recomputed."""
        model, choice = self.model, self.choice
        cells = (model.shards - model.first) * len(model.rows)
        return len(choice.in_memory) == model.shards and len(choice.kept) == cells

    @property
    def uses(self) -> list[tuple[str, int]]:
        """The uses of memory at the peak, the largest first; together they are :attr:`memory_bytes`."""
        found = {**self.peak.uses, "earlier steps": self.model.margin_bytes}
        return sorted(((use, nbytes) for use, nbytes in found.items() if nbytes), key=lambda each: -each[1])


def predict(model: StepModel, choice: Choice) -> Prediction:
    """Plans, simulates and counts one choice."""
    plan = plan_step(model, choice)
    return Prediction(choice, plan, simulate(plan, model, choice), step_bytes(model, choice), model)


def _bytes(model: StepModel, choice: Choice) -> int:
    return step_bytes(model, choice).memory + model.margin_bytes


def _seconds(model: StepModel, choice: Choice) -> float:
    return simulate(plan_step(model, choice), model, choice).seconds


def choose(model: StepModel, limit_bytes: int) -> Choice:
    """Slots, shards in memory and what else fits in ``limit_bytes``. Raises NothingFitsError if nothing does."""
    movable, given = sorted(model.resting_bytes), model.given
    movable = _first_within(movable, lambda j: model.resting_bytes[j] + model.gradient_bytes[j], given.resident_bytes)
    slots = given.slots or model.least_slots

    def resting(count: int) -> Choice:
        """With the first shards in memory: in a forward they have nothing to hide their loads behind."""
        return Choice(min(slots, model.shards - count), frozenset(movable[:count]))

    def least(count: int) -> int:
        return least_bytes(model, resting(count))

    # With all of them, without slots and buffers, it may take less than with one shard fewer, and than with none.
    count = len(movable)
    if least(count) > limit_bytes:
        fitting = _most(lambda fewer: least(fewer) <= limit_bytes, count - 1)
        count = fitting or min((0, count), key=least)
    return fill(model, resting(count), limit_bytes, resizes=True)


def fill(model: StepModel, choice: Choice, limit_bytes: int, *, resizes: bool = False) -> Choice:
    """Adds what fits to the slots and shards in memory of ``choice``; ``resizes``: also slots.

    Raises NothingFitsError if the step does not fit without any of it.
    """
    if (least := least_bytes(model, choice)) > limit_bytes:
        raise NothingFitsError(least, limit_bytes)

    def fits(tried: Choice) -> bool:
        return _bytes(model, tried) <= limit_bytes

    now = _with_graphs(model, _leanest(model, choice), fits)
    now = _with_boundaries(model, _with_waiting(model, now, fits), fits)
    if resizes and model.given.slots is None:
        more = replace(now, slots=min(now.slots + 1, model.shards - len(now.in_memory)))
        if more != now and fits(more) and _seconds(model, more) <= (1 - LEAST_GAIN) * _seconds(model, now):
            return more
    return now


def least_bytes(model: StepModel, choice: Choice) -> int:
    """Predicted bytes with the slots and shards in memory of ``choice`` and nothing that is left out to save bytes."""
    return _bytes(model, _leanest(model, choice))


def least_limit(needed: Callable[[int], int], limit: int) -> int:
    """The least number, not below ``limit``, that is no less than what is ``needed`` with it, which grows with it."""
    while (more := needed(limit)) > limit:
        limit = more
    return limit


def _leanest(model: StepModel, choice: Choice) -> Choice:
    given = model.given.boundary_bytes or 0.0  # of which their gradients take a half
    boundary_bytes = given / 2 if model.spills else math.inf
    return replace(choice, kept=frozenset(), waiting=frozenset(), boundary_bytes=boundary_bytes)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 where none does, or none but that."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _first_within(items: list[_T], nbytes: Callable[[_T], int], most: int | None) -> list[_T]:
    """The first items, together of no more bytes than ``most``."""
    if most is None:
        return items
    return items[: sum(total <= most for total in itertools.accumulate(map(nbytes, items)))]


def _with_graphs(model: StepModel, choice: Choice, fits: _Fits) -> Choice:
    cells = [(j, i) for j in range(model.shards - 1, model.first - 1, -1) for i in range(len(model.rows))]
    cells = _first_within(cells, lambda cell: model.cells[cell[0]][cell[1]].graph, model.given.graph_bytes)
    return _with_most(lambda count: replace(choice, kept=frozenset(cells[:count])), len(cells), fits)


def _with_waiting(model: StepModel, choice: Choice, fits: _Fits) -> Choice:
    """The gradients of the first shards wait, which are updated first."""
    if not model.gradients_wait:
        return choice
    away = [j for j in range(model.first, model.shards) if j not in choice.in_memory | model.in_host]
    for most in (model.given.gradient_bytes, model.host_bytes):
        away = _first_within(away, model.gradient_bytes.__getitem__, most)
    return _with_most(lambda count: replace(choice, waiting=frozenset(away[:count])), len(away), fits)


def _with_boundaries(model: StepModel, choice: Choice, fits: _Fits) -> Choice:
    """Of those that are not in motion, some or all stay."""
    if model.given.boundary_bytes is not None or not model.spills:
        return choice
    each = [cell.enters for cells in model.cells for cell in cells]
    moving, total = MOVING * max(each), sum(each)

    def staying(level: int) -> Choice:
        nbytes = math.inf if level == LEVELS else moving + level * total / LEVELS
        return replace(choice, boundary_bytes=nbytes) if level else choice

    return _with_most(staying, LEVELS, fits)


def _with_most(choice: Callable[[int], Choice], most: int, fits: _Fits) -> Choice:
    return choice(_most(lambda count: fits(choice(count)), most))


# --- what a choice saves, and what lanes do ---------------------------------------------------------------------------


def seconds_saved(predicted: Prediction) -> Mapping[str, float]:
    """Predicted seconds that a step would take more without each use of memory, all else unchanged."""
    model, choice = predicted.model, predicted.choice
    least = min(model.least_slots, model.shards)
    without = {
        "slots": replace(choice, slots=min(least, choice.slots)),
        "homes": replace(choice, in_memory=frozenset(), slots=max(choice.slots, least)) if choice.in_memory else choice,
        "graphs": replace(choice, kept=frozenset()),
        "gradients": replace(choice, waiting=frozenset()),
        "boundaries": replace(choice, boundary_bytes=0.0 if model.spills else choice.boundary_bytes),
    }
    return {
        use: _seconds(model, other) - predicted.forecast.seconds for use, other in without.items() if other != choice
    }


class Moved(NamedTuple):
    """What one lane does in a step. Lanes run side by side, and beside layers."""

    what: str
    #: Different ones.
    shards: int
    #: Bytes that are copied; of updates, those of their gradients.
    nbytes: int
    #: Predicted.
    seconds: float


def moves(predicted: Prediction) -> Iterator[Moved]:
    """What lanes do in a step: loads, gradients, updates, boundaries written out and read back."""
    model, choice = predicted.model, predicted.choice
    seconds, still = model.seconds(choice), choice.in_memory | choice.waiting
    lanes: dict[str, tuple[set[Kind], Callable[[Action], int]]] = {
        "loads": ({Kind.LOAD}, lambda a: model.loaded_bytes[a.shard]),
        "gradients": ({Kind.DRAIN}, lambda a: 0 if a.shard in still else model.gradient_bytes[a.shard]),
        "updates": ({Kind.UPDATE, Kind.UPDATE_IN_BACKWARD}, lambda a: model.gradient_bytes[a.shard]),
        "boundaries": ({Kind.SPILL, Kind.PREFETCH}, lambda a: model.boundaries((a.shard, a.microbatch or 0))),
    }
    for what, (kinds, nbytes) in lanes.items():
        actions = [a for a in predicted.plan.actions if a.kind in kinds and nbytes(a)]
        if actions:
            taken = sum(seconds[a.kind][a.shard] for a in actions)
            yield Moved(what, len({a.shard for a in actions}), sum(map(nbytes, actions)), taken)
