"""Skip trackers: hold each skip tensor between the layer that stashes it and the layer that pops it.

Inside a stage the stage's tracker holds a skip tensor. Between stages it is an additional output of the stage that
stashes it and an additional input of the stage that pops it; the pipeline copies it there directly (see
:mod:`pipe.pipeline`). So autograd, checkpointing and copies treat it like any other tensor, and each cell of a pipeline
has a tracker of its own. Without a pipeline each thread has one tracker.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from pipe.skip.namespace import Key

__all__ = ["SkipTracker", "current_skip_tracker", "use_skip_tracker"]

SkipTracker = dict[Key | None, Any]
"""Skip tensors that were stashed and not yet popped."""


_thread_local = threading.local()


@contextlib.contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """A context in which skippable layers of this thread use ``tracker``."""
    before, _thread_local.tracker = current_skip_tracker(), tracker
    try:
        yield
    finally:
        _thread_local.tracker = before


def current_skip_tracker() -> SkipTracker:
    """The tracker that skippable layers of this thread use."""
    return vars(_thread_local).setdefault("tracker", {})  # type: ignore[no-any-return]
