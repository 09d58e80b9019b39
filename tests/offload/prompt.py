"""The opposite of a late lane: a lane that is always ahead of whoever forgot to tell it what to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.streaming.lane import Arrival
from tests.offload.late import LateLane


class PromptLane(LateLane):
    """Runs what is submitted at once."""

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        arrival = super().submit(token, copy, after)
        arrival.run()  # type: ignore[attr-defined]
        return arrival
