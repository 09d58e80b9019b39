"""Lists modules and parameters of a model without waiting for its pending updates.

Listing the parameters of an :class:`~offload.OffloadModel` first finishes its pending updates, because the caller may
read values. Code that needs the parameter objects only uses :func:`identities_only`: the updates then stay pending, and
run during the next forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["identities_only", "values_may_be_read"]

_IDENTITIES_ONLY: ContextVar[bool] = ContextVar("identities_only", default=False)


@contextlib.contextmanager
def identities_only() -> Iterator[None]:
    """A context, or a decorator, for code that lists modules and parameters but reads no values."""
    token = _IDENTITIES_ONLY.set(True)
    try:
        yield
    finally:
        _IDENTITIES_ONLY.reset(token)


def values_may_be_read() -> bool:
    """Whether the caller is outside of :func:`identities_only`."""
    return not _IDENTITIES_ONLY.get()
