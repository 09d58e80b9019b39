"""A thread pool for blocking I/O, whose caller takes part: it runs the calls that no thread has begun.

Guarantees
    * ``synchronize()`` returns after the call, or raises what it raised. If no thread has begun the call, the waiting
      thread runs it. So no wait is endless where threads are missing: in a forked process, or at exit.
    * The threads are never joined, not even by finalizers. They end when the pool is no longer referenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from offload.storage.io_threads import Future, IOThreads

__all__ = ["IOThreadPool", "PooledCall"]


class PooledCall:
    """A call that runs once.

    The thread that runs it removes it from ``todo`` first. Without this, the thread or the queue would keep the call,
    and its tensors, for a moment after the waiting thread believes them to be free.
    """

    def __init__(self, todo: list[Callable[[], None]], future: Future | None) -> None:
        self._todo = todo
        self._future = future

    @property
    def succeeded(self) -> bool:
        """Whether a thread has run it without an error."""
        return self._future is not None and not self._todo and self._future.returned

    def synchronize(self) -> None:
        """Returns after the call; raises what it raised."""
        if self._future is not None and not self._future.cancel():
            self._future.result()
            if not self._future.missed:
                return
        while self._todo:
            self._todo.pop()()

    def cancel(self) -> None:
        """Returns once the call is not running and never will be."""
        if self._future is not None and not self._future.cancel():
            self._future.wait_idle()
        self._todo.clear()


class IOThreadPool:
    """``helpers`` threads, started on demand."""

    def __init__(self, helpers: int) -> None:
        self._threads = IOThreads(helpers, "offload-io")

    def submit(self, work: Callable[[], None]) -> PooledCall:
        """Queues a call."""
        todo = [work]

        def do() -> None:
            todo.pop()()

        with contextlib.suppress(RuntimeError):  # in a forked process, or at exit, there are no threads
            return PooledCall(todo, self._threads.submit(do))
        return PooledCall(todo, None)

    def wait_idle(self) -> None:
        """Returns once all queued calls have ended. For a pool of one thread."""
        self._threads.wait_idle()
