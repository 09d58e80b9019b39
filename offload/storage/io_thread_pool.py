"""A few threads that do what blocks, such as a read from a disk, while their caller does more of it.

Guarantees
    * ``synchronize()`` returns after the job, or raises what it raised. A job that no thread has begun is done by
      whoever waits for it. So nothing waits for ever, also where the threads are gone: in a forked process, or at the
      end.
    * Nobody ever joins the threads, finalizers least of all. They end when the thread pool is no longer referenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from offload.storage.io_threads import Future, IOThreads

__all__ = ["IOThreadPool", "PooledCall"]


class PooledCall:
    """Something to be done once.

    Whoever does it takes it out of ``todo``. Without this, a thread, or the queue of a job that its waiter did, would
    keep the work a moment longer than it takes, and with it the tensors that the waiter believes to be free.
    """

    def __init__(self, todo: list[Callable[[], None]], future: Future | None) -> None:
        self._todo = todo
        self._future = future

    @property
    def succeeded(self) -> bool:
        """Whether a thread has done it, without an error."""
        return self._future is not None and not self._todo and self._future.returned

    def synchronize(self) -> None:
        """Returns when the job is done; raises what it raised."""
        if self._future is not None and not self._future.cancel():
            self._future.result()
            if not self._future.missed:
                return
        while self._todo:
            self._todo.pop()()

    def cancel(self) -> None:
        """Returns when the job will touch nothing any more, whether it was done or not."""
        if self._future is not None and not self._future.cancel():
            self._future.wait_idle()
        self._todo.clear()


class IOThreadPool:
    """``helpers`` threads, which are started when there is work for them."""

    def __init__(self, helpers: int) -> None:
        self._threads = IOThreads(helpers, "offload-io")

    def submit(self, work: Callable[[], None]) -> PooledCall:
        """Queues a job."""
        todo = [work]

        def do() -> None:
            todo.pop()()

        with contextlib.suppress(RuntimeError):  # the interpreter is ending, or forked: no thread takes anything
            return PooledCall(todo, self._threads.submit(do))
        return PooledCall(todo, None)

    def wait_idle(self) -> None:
        """Returns when no thread works any more. For a single helper."""
        self._threads.wait_idle()
