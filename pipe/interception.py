"""Lets the caller of a forward replace the output of a module inside it, through a thread-local handler.

Calling a model that streams its weights once per chunk is slow. Therefore such a module first passes its call to
:func:`offered`; the handler that code around the forward set with :func:`intercepting` returns the outputs, or None if
the module is to compute them.

Guarantees
    * A handler is active only in the thread that entered :func:`intercepting`, until that context ends.
    * Without a handler the cost is one thread-local read per call of a module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Handler", "intercepting", "offered"]

Handler = Callable[[Any, Sequence[Any]], "list[Any] | None"]
"""``handler(module, micro_batches)``: one output for each micro-batch, or None if the module is to compute them."""


class _Local(threading.local):
    handler: Handler | None = None


_local = _Local()


@contextlib.contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """A context in which ``handler`` receives the calls of modules that use :func:`offered`, in this thread."""
    before = _local.handler
    _local.handler = handler
    try:
        yield
    finally:
        _local.handler = before


def offered(module: Any, micro_batches: Sequence[Any]) -> list[Any] | None:
    """Passes a call to the active handler, with the (args, kwargs) of each micro-batch. None: compute the outputs."""
    handler = _local.handler
    return None if handler is None else handler(module, micro_batches)
