"""Daemon threads that run queued I/O, and its futures: like ``concurrent.futures``, but safe with Ctrl-C and fork.

An exception inside ``concurrent.futures``' ``submit``, such as Ctrl-C, can leave a thread that the pool does not know:
it never ends, and the interpreter waits for it forever. In a forked process it waits for threads of the parent.

Guarantees
    * After an exception at any line of :meth:`IOThreads.submit` the work is queued, or never will be.
    * :meth:`Future.result` returns after the work, or raises what the work raised, at every call. An exception during
      a wait does not keep other threads waiting.
    * Threads end when their :class:`IOThreads` is unreferenced or closed, after all queued work. Finalizers never wait
      for them. At exit the interpreter waits for queued work; Ctrl-C ends that wait.
    * In a forked child :meth:`IOThreads.submit` and :meth:`Future.result` raise ``RuntimeError``.

Assumes
    * Signal handlers run in the main thread, so they never interrupt the work.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from offload.storage.process import check_process

__all__ = ["Future", "IOThreads"]

#: A waiting thread checks again after this time, in case another one was interrupted before it could wake this one.
RECHECK_SECONDS = 1.0


class Future:
    """Work that an I/O thread runs once."""

    __slots__ = ("_begun", "_error", "_finished", "_gate", "_made_in", "_work", "missed")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = [work]
        self._begun = False
        self._finished = False
        self._error: BaseException | None = None
        #: Whether the work was cancelled just after a thread had begun, so that it did not run.
        self.missed = False
        self._made_in = os.getpid()
        #: Held until the work is finished.
        self._gate = threading.Lock()
        self._gate.acquire()

    def run(self) -> None:
        """Runs the work, unless it was cancelled. Called by one thread, once."""
        self._begun = True  # before the work is popped: see cancel()
        try:
            self._take()()
        except BaseException as error:
            self._error = error
        finally:
            self._finished = True
            self._gate.release()
            # Without this, an error's traceback and this future refer to each other.
            del self

    def _take(self) -> Callable[[], None]:
        try:
            return self._work.pop()
        except IndexError:
            self.missed = True
            return _nothing

    def cancel(self) -> bool:
        """Withdraws the work; returns whether it certainly will not run.

        If False, :attr:`missed` is known after :meth:`wait_idle`. May be called again.
        """
        self._work.clear()
        # A thread that begins later finds no work. One that began before may have it.
        return not self._begun

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._finished

    @property
    def returned(self) -> bool:
        """Whether the work has ended without an error."""
        return self._finished and self._error is None

    def wait_idle(self) -> None:
        """Waits until the work has ended, with or without an error."""
        if not self._finished:
            check_process(self._made_in, "queued work")
        while not self._finished:
            if self._gate.acquire(timeout=RECHECK_SECONDS):
                self._gate.release()

    def result(self) -> None:
        """Waits until the work has ended; raises what it raised."""
        self.wait_idle()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # as in run()


def _nothing() -> None:
    """Replaces cancelled work."""


class IOThreads:
    """At most ``count`` threads, started on demand.

    Args:
        count: a single thread runs work in the order of submission.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        #: A thread without a permit ends at once, so starting one too many is harmless.
        self._permits = threading.Semaphore(count)
        self._started: list[threading.Thread] = []
        self._made_in = os.getpid()
        self._closed = False
        self._end = weakref.finalize(self, _end, self._queue, count)
        self._end.atexit = False  # see _finish_work
        _alive.add(self)

    def submit(self, work: Callable[[], None]) -> Future:
        """Queues work.

        Raises:
            RuntimeError: if the threads were closed, the interpreter is ending, or this is a forked child.
        """
        check_process(self._made_in, f"the I/O thread {self._name}")
        if self._closed:
            raise RuntimeError(f"the I/O thread {self._name} takes no more work: it was closed")
        if len(self._started) < self._count:
            # A daemon: the interpreter waits for the work, in _finish_work, not for the thread.
            thread = threading.Thread(target=_work, args=(self._queue, self._permits), name=self._name, daemon=True)
            thread.start()
            self._started.append(thread)
        future = Future(work)
        self._queue.put(future)
        return future

    def wait_idle(self) -> None:
        """Waits until all submitted work has ended, with or without errors. For a single thread."""
        assert self._count == 1
        if self._started and not self._closed and self._made_in == os.getpid():
            barrier = Future(_nothing)
            self._queue.put(barrier)
            barrier.wait_idle()

    def close(self) -> None:
        """Refuses further work; submitted work still runs. Does not wait."""
        self._closed = True
        if self._made_in == os.getpid():
            self._end()


def _work(queue: SimpleQueue[Future | None], permits: threading.Semaphore) -> None:
    if not permits.acquire(blocking=False):
        return
    while (future := queue.get()) is not None:
        future.run()
        # Without this, the thread keeps the last work and its tensors until the next.
        del future


def _end(queue: SimpleQueue[Future | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


_alive: weakref.WeakSet[IOThreads] = weakref.WeakSet()


@atexit.register
def _finish_work() -> None:
    """At exit: waits for queued work, since memory must not be freed during a copy."""
    pools = [pool for pool in list(_alive) if pool._made_in == os.getpid()]
    for pool in pools:
        pool.close()
    for pool in pools:
        for thread in pool._started:
            thread.join()
