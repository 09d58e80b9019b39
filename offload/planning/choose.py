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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from offload.planning.plan import Action, Plan
from offload.planning.planner import LANES, Forecast, forecast, plan_step
from offload.planning.step_bytes import StepBytes, step_bytes
from offload.planning.step_model import LEAST_SLOTS, MOVING, Choice, StepModel

__all__ = ["NothingFitsError", "Prediction", "choose", "fill", "least_bytes", "least_limit", "moves", "predict"]

#: Numbers of bytes for boundaries among which is chosen.
LEVELS = 32
#: Least gain, of the seconds of a step, for which there is another slot: its memory is held all the time.
LEAST_GAIN = 5e-3

_T = TypeVar("_T")


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
        """In the memory that layers compute in, with what measured steps took beside."""
        return self.peak.memory + self.model.beside_bytes

    @cached_property
    def all_stays(self) -> bool:
        """Whether nothing moves, and nothing is recomputed."""
        model, cells = self.model, (self.model.shards - self.model.first) * len(self.model.rows)
        return len(self.choice.in_memory) == model.shards and len(self.choice.kept) == cells

    @property
    def uses(self) -> list[tuple[str, int]]:
        """The uses of memory at the peak, the largest first; together they are :attr:`memory_bytes`."""
        found = {**self.peak.uses, "beside these": self.model.beside_bytes}
        return sorted(((use, nbytes) for use, nbytes in found.items() if nbytes), key=lambda each: -each[1])


def predict(model: StepModel, choice: Choice) -> Prediction:
    """Plans one choice, and counts its seconds and bytes."""
    plan = plan_step(model, choice)
    return Prediction(choice, plan, forecast(plan, model, choice), step_bytes(model, choice), model)


def choose(model: StepModel, limit_bytes: int) -> Choice:
    """Slots, shards in memory and what else fits in ``limit_bytes``. Raises NothingFitsError if nothing does."""
    given, slots = model.given, model.given.slots or LEAST_SLOTS
    movable = _first_within(
        sorted(model.resting_bytes), lambda j: model.resting_bytes[j] + model.gradient_bytes[j], given.resident_bytes
    )

    def resting(count: int) -> Choice:
        """With the first shards in memory: in a forward they have nothing to hide their loads behind."""
        return Choice(min(slots, model.shards - count), frozenset(movable[:count]))

    def least(count: int) -> int:
        return least_bytes(model, resting(count))

    # With all of them, without slots and buffers, it may take less than with one shard fewer, and than with none.
    count = len(movable)
    if least(count) > limit_bytes:
        count = _most(lambda fewer: least(fewer) <= limit_bytes, count - 1) or min((0, count), key=least)
    now = fill(model, resting(count), limit_bytes)
    more = replace(now, slots=min(now.slots + 1, model.shards - count))
    if given.slots is None and more != now and step_bytes(model, more).memory <= limit_bytes:
        seconds, fewer = predict(model, now).forecast.seconds, predict(model, more).forecast.seconds
        return more if fewer <= (1 - LEAST_GAIN) * seconds else now
    return now


def fill(model: StepModel, choice: Choice, limit_bytes: int) -> Choice:
    """Adds what fits to the slots and shards in memory of ``choice``: graphs, gradients that wait, boundaries.

    Raises NothingFitsError if the step does not fit without any of it.
    """
    if (least := least_bytes(model, choice)) > limit_bytes:
        raise NothingFitsError(least, limit_bytes)
    now = _leanest(model, choice)
    for options in (_graphs, _waiting, _boundaries):
        now = _richest(*options(model, now), lambda tried: step_bytes(model, tried).memory <= limit_bytes)
    return now


def least_bytes(model: StepModel, choice: Choice) -> int:
    """Predicted bytes with the slots and shards in memory of ``choice`` and nothing that is left out to save bytes."""
    return step_bytes(model, _leanest(model, choice)).memory


def least_limit(needed: Callable[[int], int], limit: int) -> int:
    """The least number, not below ``limit``, that is no less than what is ``needed`` with it, which grows with it."""
    while (more := needed(limit)) > limit:
        limit = more
    return limit


def _leanest(model: StepModel, choice: Choice) -> Choice:
    # Of given bytes, gradients of boundaries take a half.
    boundary_bytes = (model.given.boundary_bytes or 0.0) / 2 if model.spills else math.inf
    return replace(choice, kept=frozenset(), waiting=frozenset(), boundary_bytes=boundary_bytes)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits; 0 where none does, or none but that."""
    return bisect_left(range(1, most + 1), True, key=lambda count: not fits(count))


def _richest(choice: Callable[[int], Choice], most: int, fits: Callable[[Choice], bool]) -> Choice:
    return choice(_most(lambda count: fits(choice(count)), most))


def _first_within(items: list[_T], nbytes: Callable[[_T], int], most: int | None) -> list[_T]:
    """The first items, together of no more bytes than ``most``."""
    if most is None:
        return items
    return items[: sum(total <= most for total in itertools.accumulate(map(nbytes, items)))]


def _graphs(model: StepModel, now: Choice) -> tuple[Callable[[int], Choice], int]:
    """What makes a choice with so many graphs kept, those first that backward begins with; and the largest number."""
    cells = [(j, i) for j in range(model.shards - 1, model.first - 1, -1) for i in range(len(model.rows))]
    cells = _first_within(cells, lambda cell: model.cells[cell[0]][cell[1]].graph, model.given.graph_bytes)
    return lambda count: replace(now, kept=frozenset(cells[:count])), len(cells)


def _waiting(model: StepModel, now: Choice) -> tuple[Callable[[int], Choice], int]:
    """The same of shards whose gradients wait: the first ones, which are updated first."""
    away = [j for j in range(model.first, model.shards) if j not in now.in_memory | model.in_host]
    for most in (model.given.gradient_bytes, model.host_bytes) if model.gradients_wait else (0,):
        away = _first_within(away, model.gradient_bytes.__getitem__, most)
    return lambda count: replace(now, waiting=frozenset(away[:count])), len(away)


def _boundaries(model: StepModel, now: Choice) -> tuple[Callable[[int], Choice], int]:
    """The same of boundaries that stay, beside those in motion: parts of all."""
    each = [cell.enters for cells in model.cells for cell in cells]
    moving, total = MOVING * max(each), sum(each)

    def staying(level: int) -> Choice:
        nbytes = math.inf if level == LEVELS else moving + level * total / LEVELS
        return replace(now, boundary_bytes=nbytes) if level else now

    return staying, LEVELS if model.given.boundary_bytes is None and model.spills else 0


# --- what lanes do ----------------------------------------------------------------------------------------------------


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
    lanes: dict[str, Callable[[Action], int]] = {
        "loads": lambda a: model.loaded_bytes[a.shard],
        "gradients": lambda a: 0 if a.shard in still else model.gradient_bytes[a.shard],
        "updates": lambda a: model.gradient_bytes[a.shard],
        "boundaries": lambda a: model.boundaries(a.shard, model.rows[a.microbatch or 0]),
    }
    for what, nbytes in lanes.items():
        actions = [a for a in predicted.plan.actions if LANES.get(a.kind) == what and nbytes(a)]
        if actions:
            taken = sum(seconds[a.kind][a.shard] for a in actions)
            yield Moved(what, len({a.shard for a in actions}), sum(map(nbytes, actions)), taken)
