"""A lane that runs late: every copy is held back until it is waited for, and copies overtake each other.

With it a forgotten wait reads garbage every time, on any machine. ``LateLane`` keeps exactly the promises that
:class:`offload.streaming.lane.CopyLane` makes and none more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from offload.streaming.lane import Arrival, CopyLane, CopyLanes
from offload.streaming.streamer import SlotPool


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
        for arrival in self.after:
            arrival.run()  # type: ignore[attr-defined]
        self.lane.log.append(self.token)
        copy, self.copy = self.copy, lambda: None  # what it holds is free from now on
        try:
            with torch.no_grad():
                copy()
        except BaseException as error:
            self.error = error

    def wait(self) -> None:
        # The adversary lets any other copies overtake this one first.
        pending, random = self.lane.pending, self.lane.random
        some = random.sample(pending, random.randint(0, len(pending)) if self.lane.overtakes else 0)
        for other in pending[::-1] if self.lane.backwards else some:
            other.run()
        self.run()
        if self.error is not None:
            raise self.error

    synchronize = wait


class LateLane(CopyLane):
    """A lane whose order an adversary chooses.

    Args:
        seed: of the adversary; None: nothing overtakes.
        backwards: the last copy comes first, whatever the seed.
    """

    def __init__(self, seed: int | None = 0, backwards: bool = False) -> None:
        self.backwards, self.overtakes = backwards, seed is not None
        self.random = random.Random(seed)
        self.pending: list[LateArrival] = []
        self.log: list[str] = []

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        arrival = LateArrival(self, token, copy, after)
        self.pending.append(arrival)
        return arrival

    def wait_idle(self) -> None:
        for arrival in list(self.pending):
            arrival.run()

    close = wait_idle


class PromptLane(LateLane):
    """The opposite: runs each job as early as its declared waits allow."""

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        arrival = super().submit(token, copy, after)
        arrival.run()  # type: ignore[attr-defined]
        return arrival


def run_late(monkeypatch: pytest.MonkeyPatch, seed: int = 0, *, backwards: bool = False) -> list[LateLane]:
    """Models made from now on move their bytes on late lanes, and every slot holds NaN until it is filled."""
    made: list[LateLane] = []

    def open_late_lanes(device: object, **_: object) -> CopyLanes:
        lanes = [LateLane(seed + k, backwards) for k in range(3)]
        made.extend(lanes)
        return CopyLanes(*lanes)

    monkeypatch.setattr("offload.construction.open_lanes", open_late_lanes)
    acquire, acquire_unneeded, release = SlotPool.acquire_slot, SlotPool.acquire_unneeded, SlotPool.release
    updated: set[int] = set()  # slots that an update may still write to: the load that fills them comes after it

    def poisoned(slot: torch.Tensor | None) -> torch.Tensor | None:
        if slot is None or slot.data_ptr() in updated:
            return slot
        # Every float made of these bytes is NaN.
        return slot.fill_(255)

    def released(self: SlotPool, slot: torch.Tensor, *, last: bool = False) -> None:
        (updated.add if last else updated.discard)(slot.data_ptr())
        release(self, slot, last=last)

    monkeypatch.setattr(SlotPool, "acquire_slot", lambda self, nbytes: poisoned(acquire(self, nbytes)))
    monkeypatch.setattr(SlotPool, "release", released)
    monkeypatch.setattr(SlotPool, "acquire_unneeded", lambda self, streamer: poisoned(acquire_unneeded(self, streamer)))
    return made
