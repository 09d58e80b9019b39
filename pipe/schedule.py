"""The order in which a pipeline runs its cells: fill-drain and 1F1B, as actions clock by clock.

A cell is one micro-batch ``i`` on one stage ``j``. It runs forward once (``F{j}.{i}``) and backward once
(``B{j}.{i}``). The actions of one clock are on different stages, and need only actions of earlier clocks; they are
listed in the direction of data flow.

Source: fill-drain from GPipe (Huang et al., 2019), with turns the breadth-first schedule (Lamy-Poirier, 2023); 1F1B
from PipeDream-Flush (Narayanan et al., 2021).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

__all__ = ["Clocks", "StageAction", "clock_cycles", "fill_drain", "forward_clocks", "one_forward_one_backward"]


class StageAction(NamedTuple):
    """The forward or backward of one micro-batch on one stage."""

    kind: str
    """``"F"`` or ``"B"``."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


Clocks = list[list[StageAction]]
"""The actions of each clock."""


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


@cache
def forward_clocks(micro_batches: int, stages: int, in_turns: bool = False) -> Clocks:
    """A forward of all micro-batches. ``in_turns``: each stage runs all of them before the next stage begins."""
    if in_turns:
        return [[StageAction("F", j, i)] for j in range(stages) for i in range(micro_batches)]
    return [[StageAction("F", j, i) for i, j in cells] for cells in clock_cycles(micro_batches, stages)]


@cache
def fill_drain(micro_batches: int, stages: int, in_turns: bool = False) -> Clocks:
    """GPipe: all micro-batches forward, then all backward in reverse. Each stage holds all boundaries in between."""
    forward = forward_clocks(micro_batches, stages, in_turns)
    return forward + [[action._replace(kind="B") for action in reversed(clock)] for clock in reversed(forward)]


@cache
def one_forward_one_backward(micro_batches: int, stages: int, in_turns: bool = False) -> Clocks:
    """1F1B: each micro-batch runs backward as early as possible; stage ``j`` holds at most ``stages - j`` boundaries.

    The bubble is that of :func:`fill_drain`; 1F1B saves memory, not time. Where stages take turns it is
    :func:`fill_drain`, with which their weights are loaded as rarely as possible.
    """
    if in_turns:
        return fill_drain(micro_batches, stages, in_turns)
    clocks: dict[int, list[StageAction]] = defaultdict(list)
    for j in range(stages):
        for i in range(micro_batches):
            # A stage runs `stages - j` micro-batches forward; from then on one forward follows each backward.
            clocks[j + i if i < stages - j else j + 2 * i].append(StageAction("F", j, i))
    for j in reversed(range(stages)):
        for i in range(micro_batches):
            clocks[2 * (stages + i) - j - 1].append(StageAction("B", j, i))
    return [clocks[k] for k in sorted(clocks)]
