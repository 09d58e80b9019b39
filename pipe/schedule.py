"""Pipeline schedules (fill-drain, 1F1B) as data: printed and validated before anything runs.

A cell is one micro-batch ``i`` on one stage ``j``. It runs forward once (``F{j}.{i}``) and backward once
(``B{j}.{i}``). A schedule is the order of these actions on each device; everything else (the clock of each action, the
bubble, how many boundaries a device holds, how often it changes from one stage to another) follows from it.

A line of a schedule lists the actions of one device. Usually it has one stage; with fewer devices than stages, the
stages of a device take turns on its line.

Invariant: the engine runs the actions in the order of :meth:`Schedule.clocks`, and the trace that it records is that
list.

Source: fill-drain from GPipe (Huang et al., 2019), with turns the breadth-first schedule (Lamy-Poirier, 2023); 1F1B
from PipeDream-Flush (Narayanan et al., 2021).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

__all__ = [
    "Schedule",
    "StageAction",
    "clock_cycles",
    "fill_drain",
    "one_forward_one_backward",
]


@dataclass(frozen=True)
class StageAction:
    """The forward or backward of one micro-batch on one stage."""

    kind: str
    """``"F"`` or ``"B"``."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @staticmethod
    def parse(token: str) -> StageAction:
        """The action whose ``str`` is ``token``.

        Raises:
            ValueError: if there is none.
        """
        match = re.fullmatch(r"([FB])(\d+)\.(\d+)", token)
        if match is None:
            raise ValueError(f"expected an action such as F0.1 or B2.0, got {token!r}")
        return StageAction(match[1], int(match[2]), int(match[3]))

    def needs(self, stages: int) -> Iterator[StageAction]:
        """The actions that must run before this one."""
        if self.kind == "F":
            if self.stage > 0:
                yield StageAction("F", self.stage - 1, self.micro_batch)
        else:
            yield StageAction("F", self.stage, self.micro_batch)
            if self.stage < stages - 1:
                yield StageAction("B", self.stage + 1, self.micro_batch)


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each device, one line per device."""

    orders: tuple[tuple[StageAction, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return max((action.stage + 1 for action in chain(*self.orders)), default=0)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len({action.micro_batch for action in chain(*self.orders)})

    @cached_property
    def lines_of_stages(self) -> tuple[int, ...]:
        """For each stage, the first line with an action of it; stages of one line take turns on a device."""
        found: dict[int, int] = {}
        for line, order in enumerate(self.orders):
            for action in order:
                found.setdefault(action.stage, line)
        return tuple(found.get(j, -1) for j in range(self.stages))

    @staticmethod
    def parse(text: str) -> Schedule:
        """A schedule from one line of actions for each device, the format of :meth:`lines`."""
        lines = [line.split() for line in text.strip().splitlines()]
        return Schedule(tuple(tuple(StageAction.parse(token) for token in line) for line in lines))

    def lines(self) -> str:
        """One line of actions for each device."""
        return "\n".join(" ".join(map(str, order)) for order in self.orders)

    __str__ = lines

    def clocks(self) -> list[list[StageAction]]:
        """The actions of each clock, if every action takes one clock; within a clock, in the direction of data flow.

        Raises:
            ValueError: if some actions wait for each other, or for one that is missing.
        """
        return self._clocks

    @cached_property
    def _clocks(self) -> list[list[StageAction]]:
        stages = self.stages
        position = [0] * len(self.orders)
        done: set[StageAction] = set()
        clocks: list[list[StageAction]] = []
        while True:
            following = [
                (k, order[p]) for k, (p, order) in enumerate(zip(position, self.orders, strict=True)) if p < len(order)
            ]
            if not following:
                return clocks
            ready = [(k, action) for k, action in following if done.issuperset(action.needs(stages))]
            if not ready:
                waits = ", ".join(
                    f"{action} waits for {'and '.join(str(n) for n in action.needs(stages) if n not in done)}"
                    for _, action in following
                )
                raise ValueError(f"expected a schedule that can run, got a deadlock: {waits}")
            for k, action in ready:
                position[k] += 1
                done.add(action)
            # In the direction of data flow, which is also the order in which autograd runs the cells of a clock.
            clocks.append(
                sorted((a for _, a in ready), key=lambda a: (a.kind == "B", a.stage if a.kind == "F" else -a.stage))
            )

    @cached_property
    def coming(self) -> dict[StageAction, StageAction]:
        """See :func:`coming_turns`."""
        return coming_turns(self.clocks(), self.lines_of_stages)

    @cached_property
    def forward_first(self) -> Schedule:
        """The schedule with all forwards of a line before its backwards."""
        return Schedule(tuple(tuple(sorted(order, key=lambda action: action.kind == "B")) for order in self.orders))

    def validate(self) -> Schedule:
        """Checks the schedule and returns it: every cell runs forward once and backward once, all cells of a stage on
        one device; stages and micro-batches are numbered from 0; there is no deadlock.

        Raises:
            ValueError: naming all violations.
        """
        wrong: list[str] = []
        # Up to the highest number: a missing number is a micro-batch that never runs.
        micro_batches = range(max((action.micro_batch + 1 for action in chain(*self.orders)), default=0))
        for line, order in enumerate(self.orders):
            for action in order:
                home = self.lines_of_stages[action.stage]
                if home != line:
                    wrong.append(f"{action} is in line {line}, but its stage began in line {home}")
        counts = Counter(chain(*self.orders))
        for j in range(self.stages):
            for action in (StageAction(kind, j, i) for kind in "FB" for i in micro_batches):
                if counts[action] != 1:
                    wrong.append(f"{action} occurs {counts[action]} times")
        if not wrong:
            try:
                self.clocks()
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong) + f"\n{self.lines()}")
        return self

    def follows_at_once(self, stage: int, micro_batch: int) -> bool:
        """Whether the cell's backward directly follows its forward, so that checkpointing it would save no memory."""
        order = self.orders[self.lines_of_stages[stage]]
        position = order.index(StageAction("F", stage, micro_batch))
        return order[position + 1 : position + 2] == (StageAction("B", stage, micro_batch),)


def _lines(stages: int, devices: Sequence[Hashable] | None) -> list[list[int]]:
    """The stages of each line, from the device of each stage."""
    places = list(range(stages)) if devices is None else list(devices)
    if len(places) != stages:
        raise ValueError(f"expected a device for each of {stages} stages, got {len(places)}")
    lines: dict[Hashable, list[int]] = {}
    for j, place in enumerate(places):
        lines.setdefault(place, []).append(j)
    return list(lines.values())


def fill_drain(micro_batches: int, stages: int, devices: Sequence[Hashable] | None = None) -> Schedule:
    """GPipe: all micro-batches forward, then all backward in reverse order. Each stage holds all boundaries in between.

    Args:
        micro_batches: their number.
        stages: their number.
        devices: the device of each stage. Stages on one device take turns, one turn forward and one backward, each
            with all micro-batches, so that the weights of a stage are loaded as rarely as possible. By default each
            stage has a device of its own.
    """
    return Schedule(
        tuple(
            (
                *(StageAction("F", j, i) for j in line for i in range(micro_batches)),
                *(StageAction("B", j, i) for j in reversed(line) for i in reversed(range(micro_batches))),
            )
            for line in _lines(stages, devices)
        )
    )


def one_forward_one_backward(micro_batches: int, stages: int, devices: Sequence[Hashable] | None = None) -> Schedule:
    """1F1B: each micro-batch runs backward as early as possible; stage ``j`` holds at most ``stages - j`` boundaries.

    The bubble is that of :func:`fill_drain`; 1F1B saves memory, not time. Where stages take turns on a device, it is
    :func:`fill_drain`, with which their weights are loaded as rarely as possible.
    """
    if len(_lines(stages, devices)) < stages:
        return fill_drain(micro_batches, stages, devices)
    orders = []
    for j in range(stages):
        ahead = min(stages - j, micro_batches)
        order = [StageAction("F", j, i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(StageAction("B", j, i))
            if i + ahead < micro_batches:
                order.append(StageAction("F", j, i + ahead))
        orders.append(tuple(order))
    return Schedule(tuple(orders))


def coming_turns(
    clocks: Iterable[Iterable[StageAction]], lines_of_stages: Sequence[int]
) -> dict[StageAction, StageAction]:
    """For the first action of each turn, the first action of the next turn on its line, if there is another."""
    coming: dict[StageAction, StageAction] = {}
    began: dict[int, StageAction] = {}
    for action in chain.from_iterable(clocks):
        line = lines_of_stages[action.stage]
        before = began.get(line)
        if before is None or before.stage != action.stage:
            began[line] = action
            if before is not None:
                coming[before] = action
    return coming


@cache
def forward_clocks(micro_batches: int, devices: tuple[Hashable, ...]) -> list[list[StageAction]]:
    """The clocks of a forward alone, in the order of :func:`fill_drain`."""
    orders = fill_drain(micro_batches, len(devices), devices).orders
    return Schedule(tuple(tuple(action for action in order if action.kind == "F") for order in orders)).clocks()


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """The cells ``(i, j)`` of each clock of a forward with ``m`` micro-batches and ``n`` stages::

    clock  cells
      0    (0,0)
      1    (1,0) (0,1)
      2    (2,0) (1,1) (0,2)
      3          (2,1) (1,2)
      4                (2,2)
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n))]
