"""Lists modules and parameters of a model without waiting for its pending updates.

Whoever lists the parameters of an :class:`~offload.OffloadModel` may read their values, so listing finishes the updates
that would otherwise run during the next forward. Code that only asks which they are says so.
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
    """Whether who lists parameters now may read their values."""
    return not _IDENTITIES_ONLY.get()
