"""The I/O buffers: what is read ahead is used once, by whom it was read for; nothing is lost when a disk fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipe.threads import Future, Threads


class Late(Threads):
    """Threads that never start, so that only the waiter of a job runs it."""

    def offer(self, work: Callable[[], Any]) -> Future[Any]:
        return Future(work)
