"""Lists modules and parameters of a model without waiting for its pending updates.

Listing the parameters of an :class:`~offload.OffloadModel` first finishes its pending updates, because the caller may
read values. Code that needs the parameter objects only uses :func:`identities_only`: the updates then stay pending, and
run during the next forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["identities_only", "values_may_be_read"]


class _Context:
    """Lives as long as the frame of a context."""


#: What is dead belongs to a context that an interrupt has left before it could reset the variable.
_IDENTITIES_ONLY: ContextVar[weakref.ref[_Context] | None] = ContextVar("identities_only", default=None)


@contextlib.contextmanager
def identities_only() -> Iterator[None]:
    """A context, or a decorator, for code that lists modules and parameters but reads no values."""
    here = _Context()
    token = _IDENTITIES_ONLY.set(weakref.ref(here))
    try:
        yield
    finally:
        _IDENTITIES_ONLY.reset(token)


def values_may_be_read() -> bool:
    """Whether the caller is outside of :func:`identities_only`."""
    context = _IDENTITIES_ONLY.get()
    return context is None or context() is None
