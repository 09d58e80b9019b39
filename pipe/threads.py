"""Daemon threads that run queued work, and its futures: like ``concurrent.futures``, but safe with Ctrl-C and fork.

An exception inside ``concurrent.futures``' ``submit``, such as Ctrl-C, can leave a thread that the pool does not know:
it never ends, and the interpreter waits for it forever. In a forked process it waits for threads of the parent.

Guarantees
    * After an exception at any line of :meth:`Threads.submit` the work is queued, or never will be.
    * A wait returns after the work, or raises what the work raised, every time. An exception during a wait does not
      keep other threads waiting.
    * Threads end when their :class:`Threads` is unreferenced or closed, after all queued work. Finalizers never wait
      for them. At exit the interpreter waits for queued work, or cancels it; Ctrl-C ends that wait.
    * In a forked child :meth:`Threads.submit` and waits for work of the parent raise ``RuntimeError``.
    * The operations of one thread use no others of OpenMP, unless it says how many. Threads of several teams that are
      together more than the cores do not wait for each other actively: with one idle thread that has a team, layers of
      a small model on two cores take a fifth longer, since each of their operations wakes a thread.

Assumes
    * Signal handlers run in the main thread, so they never interrupt the work.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from pipe.process import check_process
from pipe.torch_private.threads import limit_operation_threads

__all__ = ["Future", "Outcome", "Threads"]

T = TypeVar("T")

#: A waiting thread checks again after this time, in case another one was interrupted before it could wake this one.
RECHECK_SECONDS = 1.0


class Outcome(Generic[T]):
    """The result or the exception of a call, for threads that wait for it."""

    __slots__ = ("_error", "_gate", "_made_in", "_value", "done")

    def __init__(self) -> None:
        self._value: T
        self._error: BaseException | None = None
        #: Whether the call has ended on the host.
        self.done = False
        self._made_in = os.getpid()
        #: Held until the call has ended.
        self._gate = threading.Lock()
        self._gate.acquire()

    def _call(self, work: Callable[[], T]) -> None:
        """Calls ``work`` and keeps its result or its exception. Runs once."""
        try:
            self._value = work()
        except BaseException as error:
            self._error = error
        finally:
            self.done = True
            self._gate.release()
            # Without this, an error's traceback and this object refer to each other.
            del self

    def wait_idle(self) -> None:
        """Waits until the call has ended, with or without an error."""
        if not self.done:
            check_process(self._made_in, "queued work")
        while not self.done:
            if self._gate.acquire(timeout=RECHECK_SECONDS):
                self._gate.release()

    def wait(self) -> T:
        """Waits until the call has ended; returns its result, or raises its exception."""
        self.wait_idle()
        return self._result()

    def _result(self) -> T:
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # as in _call()
        return self._value


class Future(Outcome[T]):
    """Work that runs once: on a thread, or in :meth:`run_or_wait` on the waiting thread if no other has begun it."""

    __slots__ = ("_begun", "_offer", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        # Emptied before the call. Without this, a thread or the queue would keep the work, and its tensors, for a
        # moment after a waiting thread believes them to be free.
        self._work = [work]
        #: Emptied by the thread that takes the work, or by withdraw().
        self._offer = [True]
        self._begun = False

    def run(self) -> None:
        """Runs the work, unless it was withdrawn. Called by one thread, once."""
        self._begun = True  # before the offer is taken: see withdraw()
        self._call(self._take)

    def _take(self) -> Any:
        try:
            self._offer.pop()
        except IndexError:  # it was withdrawn just after this thread had begun
            return None
        return self._work.pop()()

    def withdraw(self) -> bool:
        """Takes the work back from the threads; returns whether certainly none will run it. May be called again."""
        self._offer.clear()
        # A thread that begins later finds no offer. One that began before may have taken it.
        return not self._begun

    @property
    def returned(self) -> bool:
        """Whether a thread has run the work without an error."""
        return self.done and self._error is None and not self._work

    synchronize = Outcome.wait

    def run_or_wait(self) -> T:
        """Returns the result of the work, or raises its exception. Runs it here if no thread has begun it.

        So no wait is endless where threads are missing: in a forked process, or at exit. Not after :meth:`cancel`.
        """
        if not self.withdraw():
            self.wait()
        if self._work:
            self._value = self._work.pop()()
        return self._value

    def cancel(self) -> None:
        """Returns once the work is not running and never will be."""
        if not self.withdraw():
            self.wait_idle()
        self._work.clear()


class Threads:
    """At most ``count`` threads, started on demand.

    Args:
        count: a single thread runs work in the order of submission.
        name: of the threads.
        exit_seconds: None: the interpreter ends after all queued work. Otherwise it drops queued work, and waits so
            long at most for each thread, for work that may block forever.
        operation_threads: the most threads that torch's operations use in one of these; None: as many as elsewhere.
    """

    def __init__(
        self, count: int, name: str, *, exit_seconds: float | None = None, operation_threads: int | None = 1
    ) -> None:
        self._count = count
        self._operation_threads = operation_threads
        self._name = name
        self._exit_seconds = exit_seconds
        self._queue: SimpleQueue[Future[Any] | None] = SimpleQueue()
        #: A thread without a permit ends at once, so starting one too many is harmless.
        self._permits = threading.Semaphore(count)
        self._started: list[threading.Thread] = []
        self._made_in = os.getpid()
        self._closed = False
        self._stop = weakref.finalize(self, _stop, self._queue, count)
        self._stop.atexit = False  # see _finish_work
        _alive.add(self)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues work. Raises RuntimeError if closed (also at exit of the interpreter), or in a forked child."""
        check_process(self._made_in, f"the thread {self._name}")
        if self._closed:
            raise RuntimeError(f"the thread {self._name} takes no more work: it was closed")
        if len(self._started) < self._count:
            # A daemon: the interpreter waits for the work, in _finish_work, not for the thread.
            given = self._queue, self._permits, self._operation_threads
            thread = threading.Thread(target=_work, args=given, name=self._name, daemon=True)
            thread.start()
            self._started.append(thread)
        future = Future(work)
        self._queue.put(future)
        return future

    def offer(self, work: Callable[[], T]) -> Future[T]:
        """Queues work where there are threads; for :meth:`Future.run_or_wait`."""
        with contextlib.suppress(RuntimeError):  # in a forked process, or at exit, there are none
            return self.submit(work)
        return Future(work)

    def wait_idle(self) -> None:
        """Waits until all submitted work has ended, with or without errors. For a single thread."""
        assert self._count == 1
        if self._started and not self._closed and self._made_in == os.getpid():
            barrier = Future(_alive.__len__)  # any work
            self._queue.put(barrier)
            barrier.wait_idle()

    def close(self, *, wait: bool = False) -> None:
        """Refuses further work; submitted work still runs. ``wait``: returns when the threads have ended."""
        self._closed = True
        if self._made_in == os.getpid():
            self._stop()
            for thread in self._started if wait else ():
                thread.join()


def _work(queue: SimpleQueue[Future[Any] | None], permits: threading.Semaphore, operation_threads: int | None) -> None:
    if not permits.acquire(blocking=False):
        return
    if operation_threads is not None:
        limit_operation_threads(operation_threads)
    while (future := queue.get()) is not None:
        future.run()
        # Without this, the thread keeps the last work until the next.
        del future


def _stop(queue: SimpleQueue[Future[Any] | None], count: int) -> None:
    for _ in range(count):
        queue.put(None)


_alive: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _finish_work() -> None:
    """At exit: waits for work, since memory must not be freed, nor a thread ended, inside a copy or a kernel."""
    pools = [pool for pool in list(_alive) if pool._made_in == os.getpid()]
    for pool in pools:
        with contextlib.suppress(Empty):
            while pool._exit_seconds is not None:
                pool._queue.get_nowait()
        pool.close()
    for pool in pools:
        for thread in pool._started:
            thread.join(pool._exit_seconds)
