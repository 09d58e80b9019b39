"""The opposite of a late lane: a lane that runs each job as early as its declared waits allow."""

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
