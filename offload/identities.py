"""Lists modules and parameters of a model without waiting for its pending updates.

Listing the parameters of an :class:`~offload.OffloadModel` first finishes its pending updates, because the caller may
read values. Code that needs the parameter objects only uses :func:`identities_only`: the updates then stay pending, and
run during the next forward.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["identities_only", "values_may_be_read"]

#: The identity of the frame that has entered the context. One that runs no longer has been left by an interrupt before
#: it could reset the variable.
_IDENTITIES_ONLY: ContextVar[int | None] = ContextVar("identities_only", default=None)


@contextlib.contextmanager
def identities_only() -> Iterator[None]:
    """A context, or a decorator, for code that lists modules and parameters but reads no values."""
    token = _IDENTITIES_ONLY.set(id(sys._getframe(2)))  # beyond this one and ``contextlib``'s
    try:
        yield
    finally:
        _IDENTITIES_ONLY.reset(token)


def values_may_be_read() -> bool:
    """Whether the caller is outside of :func:`identities_only`."""
    entered, frame = _IDENTITIES_ONLY.get(), sys._getframe(1)
    if entered is None:
        return True
    while frame is not None:
        if id(frame) == entered:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    _IDENTITIES_ONLY.set(None)
    return True
