"""Skip trackers: hold each skip tensor between the layer that stashes it and the layer that pops it.

Inside a stage the stage's tracker holds a skip tensor. Between stages it is an additional output of the stage that
stashes it and an additional input of the stage that pops it; the pipeline copies it there directly (see
:mod:`pipe.pipeline`). So autograd, checkpointing and copies treat it like any other tensor, and each cell of a pipeline
has a tracker of its own. Without a pipeline each thread has one tracker.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pipe.skip.namespace import Key

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]


class SkipTracker:
    """Skip tensors that were stashed and not yet popped; ``arrived`` are those of earlier stages."""

    def __init__(self, arrived: Iterable[tuple[Key | None, Any]] = ()) -> None:
        self.tensors: dict[Key | None, Any] = dict(arrived)

    def save(self, key: Key | None, tensor: Any) -> None:
        """Keeps a tensor, or None, until it is popped."""
        self.tensors[key] = tensor

    def load(self, key: Key | None) -> Any:
        """Removes a tensor and returns it."""
        return self.tensors.pop(key)


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


_thread_local = _ThreadLocal()


Tracker = TypeVar("Tracker", bound=SkipTracker)


@contextlib.contextmanager
def use_skip_tracker(tracker: Tracker) -> Iterator[Tracker]:
    """A context in which skippable layers of this thread use ``tracker``."""
    before, _thread_local.tracker = _thread_local.tracker, tracker
    try:
        yield tracker
    finally:
        _thread_local.tracker = before


def current_skip_tracker() -> SkipTracker:
    """The tracker that skippable layers of this thread use."""
    return _thread_local.tracker
