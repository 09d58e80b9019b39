"""A few threads that do what blocks, such as a read from a disk, while their caller does more of it.

Guarantees
    * ``finish()`` returns after the job, or raises what it raised. A job that no thread has begun is done by whoever
      waits for it. So nothing waits for ever, also where the threads are gone: in a forked process, or at the end.
    * Nobody ever joins the threads, finalizers least of all. They end when the crew is no longer referenced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["Crew", "Job"]


class Job:
    """Something to be done once.

    Whoever does it takes it out of ``todo``. Without this, a thread, or the queue of a job that its waiter did, would
    keep the work a moment longer than it takes, and with it the tensors that the waiter believes to be free.
    """

    def __init__(self, todo: list[Callable[[], None]], future: Future[None] | None) -> None:
        self._todo = todo
        self._future = future

    @property
    def succeeded(self) -> bool:
        """Whether a thread has done it, without an error."""
        future = self._future
        return future is not None and future.done() and not future.cancelled() and future.exception() is None

    def finish(self) -> None:
        """Returns when the job is done; raises what it raised."""
        if self._future is None or self._future.cancel():
            while self._todo:
                self._todo.pop()()
        else:
            self._future.result()

    def abandon(self) -> None:
        """Returns when the job will touch nothing any more, whether it was done or not."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])
        self._todo.clear()


class Crew:
    """``helpers`` threads, which are started when there is work for them."""

    def __init__(self, helpers: int) -> None:
        self._threads = ThreadPoolExecutor(helpers, thread_name_prefix="offload-io")

    def give(self, work: Callable[[], None]) -> Job:
        """Queues a job."""
        todo = [work]

        def do() -> None:
            todo.pop()()

        with contextlib.suppress(RuntimeError):  # the interpreter is ending: no thread takes anything
            return Job(todo, self._threads.submit(do))
        return Job(todo, None)
