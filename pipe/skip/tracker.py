"""Trackers: where a skip tensor is between the layer that stashes it and the layer that pops it.

Inside a stage a skip tensor waits in the stage's tracker. When it leaves the stage it is one more output, and one more
input of the stage that pops it: the pipeline carries it there past the stages between (see :mod:`pipe.pipeline`). So
autograd, checkpointing and copies treat it like any other tensor, and each cell of a pipeline has a tracker of its own.
Without a pipeline the tracker belongs to the thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from pipe.skip.namespace import Key

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]


class SkipTracker:
    """Skip tensors that were stashed and not yet popped.

    Args:
        arrived: those that come from outside.
    """

    def __init__(self, arrived: Iterable[tuple[Key, Any]] = ()) -> None:
        self.tensors: dict[Key, Any] = dict(arrived)

    def save(self, key: Key, tensor: Any) -> None:
        """Keeps a tensor, or None, until it is popped."""
        self.tensors[key] = tensor

    def load(self, key: Key) -> Any:
        """Gives a tensor out, once.

        Raises:
            KeyError: if it was not stashed, or popped already.
        """
        return self.tensors.pop(key)


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_thread_local = _ThreadLocal()


@contextlib.contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[SkipTracker]:
    """Inside, skippable layers of this thread use ``tracker``."""
    before = _thread_local.tracker
    _thread_local.tracker = tracker
    try:
        yield tracker
    finally:
        _thread_local.tracker = before


def current_skip_tracker() -> SkipTracker:
    """The tracker that skippable layers of this thread use."""
    return _thread_local.tracker
