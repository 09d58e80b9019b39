"""What a shard knows of its pending update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from offload.streaming.lane import Arrival

__all__ = ["PendingUpdate"]


class PendingUpdate(Protocol):
    """The update of a shard that a step has decided, applied before the next load."""

    @property
    def tasks(self) -> Sequence[Any]:
        """Its jobs that are not done."""

    def make_pending(self) -> None:
        """Puts it before the next load of its shard."""

    def start(self, slot: Tensor | None = None, after: Sequence[Arrival] = (), *, holds: bool = False) -> Arrival:
        """Starts it, unless it is running or done."""

    def filled(self, slot: Tensor) -> bool:
        """Whether it left the shard's new values in ``slot``."""

    def wait_idle(self) -> None:
        """Waits until no part of it is running."""
