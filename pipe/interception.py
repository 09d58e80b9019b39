"""Interception of a module's call: the caller of a forward decides what a module inside it returns.

A model that streams its weights is slow to call once per chunk. Whoever runs the chunks' forwards can therefore take
over such a call: the module offers it with :func:`offered`, the handler of :func:`intercepting` answers it, or leaves
it to the module.

Guarantees
    * A handler is in force in the thread that entered :func:`intercepting`, until that context ends, and nowhere else.
    * Without a handler a module pays one thread-local read per call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Handler", "intercepting", "offered"]

Handler = Callable[[Any, Sequence[Any]], "list[Any] | None"]
"""``handler(module, micro_batches)``: one output for each micro-batch, or None if the module shall compute them."""


class _Local(threading.local):
    handler: Handler | None = None


_local = _Local()


@contextlib.contextmanager
def intercepting(handler: Handler) -> Iterator[None]:
    """Inside, ``handler`` is offered the calls of modules that can be intercepted, in this thread."""
    before = _local.handler
    _local.handler = handler
    try:
        yield
    finally:
        _local.handler = before


def offered(module: Any, micro_batches: Sequence[Any]) -> list[Any] | None:
    """Offers a call to the handler in force. The module computes the outputs itself if this returns None.

    Args:
        module: whose forward is being called.
        micro_batches: its arguments, each an (args, kwargs) pair.
    """
    handler = _local.handler
    return None if handler is None else handler(module, micro_batches)
