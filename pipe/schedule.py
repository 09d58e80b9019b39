"""Schedules as data: which cell runs when, known, checked and simulated before anything runs.

A cell is one micro-batch ``i`` on one stage ``j``. It goes forward once (``F{j}.{i}``) and back once (``B{j}.{i}``). A
schedule is the order of these actions for each stage; everything else (the clock of each action, the bubble, how many
boundaries a device holds) follows from it.

Invariant: what runs is what is written. The executor walks :meth:`Schedule.clocks`, and the trace that it records is
that list.

Source: fill-drain from GPipe (Huang et al., 2019); 1F1B from PipeDream-Flush (Narayanan et al., 2021).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

__all__ = ["Action", "Schedule", "Simulation", "clock_cycles", "fill_drain", "one_forward_one_backward", "simulate"]


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch over one stage."""

    kind: str
    """``"F"`` or ``"B"``."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @staticmethod
    def parse(token: str) -> Action:
        """The action that prints as ``token``.

        Raises:
            ValueError: if there is none.
        """
        match = re.fullmatch(r"([FB])(\d+)\.(\d+)", token)
        if match is None:
            raise ValueError(f"expected an action such as F0.1 or B2.0, got {token!r}")
        return Action(match[1], int(match[2]), int(match[3]))

    def needs(self, stages: int) -> Iterator[Action]:
        """The actions that must come before."""
        if self.kind == "F":
            if self.stage > 0:
                yield Action("F", self.stage - 1, self.micro_batch)
        else:
            yield Action("F", self.stage, self.micro_batch)
            if self.stage < stages - 1:
                yield Action("B", self.stage + 1, self.micro_batch)


@dataclass(frozen=True)
class Schedule:
    """The order of actions on each stage."""

    orders: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.orders)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len({action.micro_batch for action in chain(*self.orders)})

    @staticmethod
    def parse(text: str) -> Schedule:
        """A schedule from one line of actions for each stage, as :meth:`lines` gives it."""
        lines = [line.split() for line in text.strip().splitlines()]
        return Schedule(tuple(tuple(Action.parse(token) for token in line) for line in lines))

    def lines(self) -> str:
        """One line of actions for each stage."""
        return "\n".join(" ".join(map(str, order)) for order in self.orders)

    def __str__(self) -> str:
        """A table: one row for each clock, one column for each stage."""
        width = max((len(str(action)) for action in chain(*self.orders)), default=1)
        rows = ["clock " + " ".join(f"{f'j={j}':<{width}}" for j in range(self.stages))]
        for clock, actions in enumerate(self.clocks()):
            cells = {action.stage: str(action) for action in actions}
            rows.append(f"{clock:5} " + " ".join(f"{cells.get(j, ''):<{width}}" for j in range(self.stages)))
        return "\n".join(row.rstrip() for row in rows)

    def clocks(self) -> list[list[Action]]:
        """The actions of each clock, where every action takes one; within a clock, in the direction of flow.

        Raises:
            ValueError: if some actions wait for each other, or for one that is missing.
        """
        position = [0] * self.stages
        done: set[Action] = set()
        clocks: list[list[Action]] = []
        while any(k < len(order) for k, order in zip(position, self.orders, strict=True)):
            following = [order[k] for k, order in zip(position, self.orders, strict=True) if k < len(order)]
            ready = [action for action in following if done.issuperset(action.needs(self.stages))]
            if not ready:
                waits = ", ".join(
                    f"{action} waits for {'and '.join(str(n) for n in action.needs(self.stages) if n not in done)}"
                    for action in following
                )
                raise ValueError(f"expected a schedule that can run, got one that stands still: {waits}")
            for action in ready:
                position[action.stage] += 1
            done.update(ready)
            # In the direction of flow, which is also the order in which autograd takes the cells of a clock.
            clocks.append(sorted(ready, key=lambda a: (a.kind == "B", a.stage if a.kind == "F" else -a.stage)))
        return clocks

    def validate(self) -> Schedule:
        """Checks that every cell goes forward once and back once, and that the schedule can run. Returns itself.

        Raises:
            ValueError: naming all violations.
        """
        wrong: list[str] = []
        micro_batches = {action.micro_batch for action in chain(*self.orders)}
        for j, order in enumerate(self.orders):
            wrong += [f"{action} stands in the line of stage {j}" for action in order if action.stage != j]
            for kind in "FB":
                for i in sorted(micro_batches):
                    count = order.count(Action(kind, j, i))
                    if count != 1:
                        wrong.append(f"{Action(kind, j, i)} stands {count} times")
        if not wrong:
            try:
                self.clocks()
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong) + f"\n{self.lines()}")
        return self

    def follows_at_once(self, stage: int, micro_batch: int) -> bool:
        """Whether the cell goes back as soon as it went forward, so that nothing can be saved by forgetting it."""
        order = self.orders[stage]
        position = order.index(Action("F", stage, micro_batch))
        return order[position + 1 : position + 2] == (Action("B", stage, micro_batch),)


def fill_drain(micro_batches: int, stages: int) -> Schedule:
    """All micro-batches forward, then all back in reverse order. Each stage holds all boundaries in between."""
    return Schedule(
        tuple(
            (
                *(Action("F", j, i) for i in range(micro_batches)),
                *(Action("B", j, i) for i in reversed(range(micro_batches))),
            )
            for j in range(stages)
        )
    )


def one_forward_one_backward(micro_batches: int, stages: int) -> Schedule:
    """Each micro-batch goes back as early as it can: stage ``j`` holds at most ``stages - j`` boundaries.

    The bubble is that of :func:`fill_drain`; what it saves is memory.
    """
    orders = []
    for j in range(stages):
        ahead = min(stages - j, micro_batches)
        order = [Action("F", j, i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(Action("B", j, i))
            if i + ahead < micro_batches:
                order.append(Action("F", j, i + ahead))
        orders.append(tuple(order))
    return Schedule(tuple(orders))


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


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs."""

    step: float
    """Time from the first action to the last, in the unit of the costs."""
    bubble: float
    """Share of the devices' time in which they wait."""
    peak_boundaries: tuple[int, ...]
    """For each device, the most cells that are forward and not yet back at the same time."""


def simulate(
    schedule: Schedule,
    cost: Callable[[Action], float] = lambda action: 1.0 if action.kind == "F" else 2.0,
    *,
    devices: Sequence[object] | None = None,
) -> Simulation:
    """Runs a schedule on paper. Copies take no time.

    Args:
        schedule: a valid schedule.
        cost: time of each action; by default 1 forward and 2 back. Pass measured times to learn the bubble they make.
        devices: the device of each stage; stages on one device take turns. By default each stage has its own.
    """
    places = list(range(schedule.stages)) if devices is None else list(devices)
    names = list(dict.fromkeys(places))
    free = dict.fromkeys(names, 0.0)
    busy = dict.fromkeys(names, 0.0)
    held = dict.fromkeys(names, 0)
    peak = dict.fromkeys(names, 0)
    end: dict[Action, float] = {}
    for action in chain(*schedule.clocks()):
        place = places[action.stage]
        start = max([free[place], *(end[before] for before in action.needs(schedule.stages))])
        duration = cost(action)
        free[place] = end[action] = start + duration
        busy[place] += duration
        held[place] += 1 if action.kind == "F" else -1
        peak[place] = max(peak[place], held[place])
    step = max(free.values(), default=0.0)
    bubble = 1 - sum(busy.values()) / (step * len(names)) if step else 0.0
    return Simulation(step, bubble, tuple(peak[name] for name in names))
