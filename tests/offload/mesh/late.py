"""A lane that runs each collective late: when its arrival is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.mesh.ranks import CollectiveLane
from offload.streaming.lane import Arrival

__all__ = ["LateLane"]


class LateLane(CollectiveLane):
    """Runs each job when it, or a later one, is waited for; never in another order."""

    def __init__(self, *device: torch.device) -> None:
        super().__init__(*device)
        self.waiting: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Any:
        self.submitted += 1

        def job() -> None:
            for arrival in after:
                arrival.synchronize()
            copy()

        self.waiting.append(job)
        number = self.submitted

        class Late:
            def wait(late) -> None:
                while self.done < number:
                    self.done += 1
                    with torch.no_grad():
                        self.waiting.pop(0)()

            synchronize = wait

        return Late()

    def wait_idle(self) -> None:
        self.waiting.clear()
