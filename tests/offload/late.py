"""A lane that runs late: every copy is held back until somebody waits for it, and copies overtake each other.

With it a forgotten wait reads garbage every time, on any machine. ``LateLane`` keeps exactly the promises that
:class:`offload.lane.Lane` makes and none more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from offload.lane import Arrival, Lane


class LateArrival(Arrival):
    def __init__(self, lane: LateLane, token: str, copy: Callable[[], None], after: Sequence[Arrival]) -> None:
        self.lane = lane
        self.token = token
        self.copy = copy
        self.after = after
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        if self.done:
            return
        self.done = True
        if self in self.lane.pending:
            self.lane.pending.remove(self)
        if not self.lane.forgets_after:
            for arrival in self.after:
                arrival.run()  # type: ignore[attr-defined]
        self.lane.log.append(self.token)
        try:
            with torch.no_grad():
                self.copy()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        if self.lane.forgets is not None and self.token.startswith(self.lane.forgets):
            return
        # The adversary lets any other copies overtake this one first.
        for other in self.lane.random.sample(self.lane.pending, self.lane.random.randint(0, len(self.lane.pending))):
            other.run()
        self.run()
        if self.error is not None:
            raise self.error

    finish = wait


class LateLane(Lane):
    """Args: ``seed`` of the adversary; ``forgets``: tokens whose waits do nothing; ``forgets_after``: no ``after``."""

    def __init__(self, seed: int = 0, forgets: str | None = None, forgets_after: bool = False) -> None:
        self.random = random.Random(seed)
        self.pending: list[LateArrival] = []
        self.log: list[str] = []
        self.forgets = forgets
        self.forgets_after = forgets_after

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        arrival = LateArrival(self, token, copy, after)
        self.pending.append(arrival)
        return arrival

    def close(self) -> None:
        for arrival in list(self.pending):
            arrival.run()
