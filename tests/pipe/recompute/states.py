"""A second run of modules whose state was saved, as a replay makes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pipe.recompute.module_state import ModuleState


@contextlib.contextmanager
def again(state: ModuleState) -> Iterator[None]:
    """A context in which modules have their state from before the forward; changes of it are undone."""
    present = state.present()
    try:
        state.put()
        yield
    finally:
        present.put()
