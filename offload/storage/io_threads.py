"""I/O threads: daemon threads that run what a queue holds, and the futures of that work.

``concurrent.futures`` does almost the same. But an exception that is raised in the middle of its ``submit``, as Ctrl-C
raises it, can leave a thread that its pool does not know. Nothing ends that thread, and the interpreter waits for it
for ever. And in a forked process it waits for threads that only the parent has.

Guarantees
    * After an exception at any line of :meth:`IOThreads.submit` the work is queued, or never will be.
    * :meth:`Future.result` returns after the work, or raises what the work raised, every time it is called. An
      exception in the middle of a wait does not keep other threads waiting.
    * Threads end when their :class:`IOThreads` is no longer referenced, or closed, after all queued work. Finalizers
      never wait for them. At exit the interpreter waits for queued work; Ctrl-C ends that wait.
    * In a forked child :meth:`IOThreads.submit` and :meth:`Future.result` raise ``RuntimeError``.

Assumes
    * Work is not interrupted: signal handlers run in the main thread.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from offload.process import check_process

__all__ = ["Future", "IOThreads"]

#: A waiter looks again after this time, in case that another waiter was interrupted before it could wake this one.
LOOK_AGAIN_SECONDS = 1.0


class Future:
    """Work that a thread runs once."""

    __slots__ = ("_begun", "_error", "_finished", "_gate", "_made_in", "_work", "missed")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = [work]
        self._begun = False
        self._finished = False
        self._error: BaseException | None = None
        #: Whether the work was taken back in the very moment in which a thread began.
        self.missed = False
        self._made_in = os.getpid()
        #: Held until the work is finished.
        self._gate = threading.Lock()
        self._gate.acquire()

    def run(self) -> None:
        """Runs the work, unless it was cancelled. Called by one thread, once."""
        self._begun = True  # before the work is taken: see cancel()
        try:
            self._take()()
        except BaseException as error:
            self._error = error
        finally:
            self._finished = True
            self._gate.release()
            # Without this, the traceback of an error would refer to this future, and the future to the traceback.
            del self

    def _take(self) -> Callable[[], None]:
        try:
            return self._work.pop()
        except IndexError:
            self.missed = True
            return _nothing

    def cancel(self) -> bool:
        """Takes the work back; says whether that is known to have been in time.

        If not, :attr:`missed` tells after :meth:`wait_idle`. May be called again.
        """
        self._work.clear()
        # A thread that begins from here on finds nothing. One that has begun before may have found it.
        return not self._begun

    def done(self) -> bool:
        """Whether a thread is done with it."""
        return self._finished

    @property
    def returned(self) -> bool:
        """Whether a thread has done it, without an error."""
        return self._finished and self._error is None

    def wait_idle(self) -> None:
        """Waits until a thread is done with it, whatever came of it."""
        if not self._finished:
            check_process(self._made_in, "what this process waits for")
        while not self._finished:
            if self._gate.acquire(timeout=LOOK_AGAIN_SECONDS):
                self._gate.release()

    def result(self) -> None:
        """Waits until a thread is done with it; raises what the work raised."""
        self.wait_idle()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # as in run()


def _nothing() -> None:
    """Stands for work that was cancelled."""


class IOThreads:
    """At most ``count`` threads, each started when there is work for it.

    Args:
        count: one thread runs its work in the order of submission.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._queue: SimpleQueue[Future | None] = SimpleQueue()
        #: A thread works only if it gets one. So it does no harm to start a thread too many.
        self._seats = threading.Semaphore(count)
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
            # A daemon: the interpreter waits for the work, at _finish_work, and not for the thread.
            thread = threading.Thread(target=_work, args=(self._queue, self._seats), name=self._name, daemon=True)
            thread.start()
            self._started.append(thread)
        future = Future(work)
        self._queue.put(future)
        return future

    def wait_idle(self) -> None:
        """Waits until all work that was submitted is done, whatever came of it. For a single thread."""
        assert self._count == 1
        if self._started and not self._closed and self._made_in == os.getpid():
            barrier = Future(_nothing)
            self._queue.put(barrier)
            barrier.wait_idle()

    def close(self) -> None:
        """Takes no more work; what was submitted is still done. Does not wait."""
        self._closed = True
        if self._made_in == os.getpid():
            self._end()


def _work(queue: SimpleQueue[Future | None], seats: threading.Semaphore) -> None:
    if not seats.acquire(blocking=False):
        return
    while (future := queue.get()) is not None:
        future.run()
        # Without this, the thread keeps the last work and what it refers to until there is more.
        del future


def _end(queue: SimpleQueue[Future | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


_alive: weakref.WeakSet[IOThreads] = weakref.WeakSet()


@atexit.register
def _finish_work() -> None:
    """At exit: waits for queued work, since a thread must not be in the middle of a copy when memory goes."""
    pools = [pool for pool in list(_alive) if pool._made_in == os.getpid()]
    for pool in pools:
        pool.close()
    for pool in pools:
        for thread in pool._started:
            thread.join()
