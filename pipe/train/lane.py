"""Lanes: ordered queues of jobs that run in a thread or on a CUDA stream, beside the compute.

Submitting a job to a lane returns a :class:`Ticket` (a future). Each consumer of the result waits for the ticket
before its first use of the result, and not earlier. This is the only module of ``pipe.train`` that touches
``torch.cuda``: a lane with a stream issues its work on that stream and records an event, a lane without one is a plain
queue. On the CPU a thread takes the part of the copy stream, so the same pipeline overlaps on any machine.

Guarantees
    * The jobs of one lane run in the order of submission, never two at a time.
    * :meth:`Ticket.wait` returns after its job has run on the host, and orders the caller's current stream behind the
      job's work on its own stream. The host never waits for a device.
    * An exception of a job, ``BaseException`` included, is raised by :meth:`Ticket.wait`, every time it is called.
    * The thread of a :class:`ThreadLane` ends with the lane, which needs no close, and keeps no job alive.
    * A job in another thread sees the settings of the thread that submitted it (:mod:`pipe.recompute.thread_state`:
      grad mode, autocast, inference mode, default device), its context variables and its current CUDA device.

Assumes
    * A job on a lane never waits for a ticket of a later job of the same lane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from pipe.recompute.thread_state import in_settings_of_this_thread
from pipe.threads import Outcome, Threads

__all__ = ["InlineLane", "Lane", "Lanes", "ThreadLane", "Ticket", "fence"]

T = TypeVar("T")


class Ticket(Outcome[T]):
    """The future of one job."""

    __slots__ = ("_event", "_stream")

    def __init__(self) -> None:
        super().__init__()
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None

    def run(self, job: Callable[[], T], stream: torch.cuda.Stream | None = None) -> None:
        """Runs the job on ``stream`` and keeps its result or its exception. Called once, by the lane."""
        self._call(job if stream is None else partial(self._run_on, stream, job))

    def _run_on(self, stream: torch.cuda.Stream, job: Callable[[], T]) -> T:
        with torch.cuda.stream(stream):  # makes its device current, too
            value = job()
            # Producer: this lane. Consumer: the stream that is current where wait() is called.
            self._stream, self._event = stream, stream.record_event()
        return value

    def succeeded(self) -> bool:
        """Waits as :meth:`wait` does, but returns whether the job succeeded instead of raising its exception."""
        # Without this, the result would be read while another thread still runs the job.
        self.wait_idle()
        if self._event is not None and self._stream is not None:
            # Without this, kernels of the current stream would read memory before the lane's stream has written it.
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return self._error is None

    def wait(self) -> T:
        """Waits for the job. Returns its result, safe to use on the current stream, or raises its exception."""
        self.succeeded()
        return self._result()

    def synchronize(self) -> None:
        """Waits on the host for the job and its work on a stream; raises the job's exception."""
        super().wait()
        if self._event is not None:
            # Without this, the host reads or frees memory that is still being copied.
            self._event.synchronize()


def fence(device: torch.device) -> Ticket[None]:
    """A ticket for all work issued on the current stream of ``device`` up to now."""
    ticket: Ticket[None] = Ticket()
    ticket.run(lambda: None, torch.cuda.current_stream(device) if device.type == "cuda" else None)
    return ticket


class Lane(ABC):
    """An ordered queue of jobs; ``stream`` is the stream of their device work, or None."""

    stream: torch.cuda.Stream | None = None

    @abstractmethod
    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Queues a job."""


class InlineLane(Lane):
    """Runs each job at once in the caller's thread; only its work on ``stream`` is asynchronous.

    The right lane for collectives: every rank issues them in one thread, and therefore in one order.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Runs the job now. An interrupt of the caller's thread (not an ``Exception``) is raised at once."""
        ticket: Ticket[T] = Ticket()
        ticket.run(job, self.stream)
        if ticket._error is not None and not isinstance(ticket._error, Exception):
            raise ticket._error
        return ticket


#: At exit a running job, such as the read of a loader, which may block forever, is waited for as long as this.
EXIT_SECONDS = 5.0


class ThreadLane(Lane):
    """Runs the jobs in a thread of its own. At exit jobs that have not begun are dropped."""

    def __init__(self, name: str, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self._threads = Threads(1, name, exit_seconds=EXIT_SECONDS)

    def submit(self, job: Callable[[], T]) -> Ticket[T]:
        """Queues the job."""
        ticket: Ticket[T] = Ticket()
        self._threads.submit(partial(ticket.run, in_settings_of_this_thread(job), self.stream))
        return ticket


@dataclass(frozen=True)
class Lanes:
    """The lanes of a train pipeline.

    Attributes:
        load: calls ``next()`` on the loader.
        copy: copies batches to the device.
        distribute: input distribution of sparse features (collectives).
        prefetch: copies rows of embedding tables into the caches of their modules.
    """

    load: Lane
    copy: Lane
    distribute: Lane
    prefetch: Lane = field(default_factory=InlineLane)

    @classmethod
    def for_device(cls, device: torch.device) -> Lanes:
        """The default: loader and copies in threads, collectives in the caller's thread, as is the compute.

        On CUDA the copy and distribute lanes have streams of ``device`` (whichever device is current).
        """
        cuda = device.type == "cuda"
        return cls(
            load=ThreadLane("train-load"),
            copy=ThreadLane("train-copy", torch.cuda.Stream(device) if cuda else None),
            distribute=InlineLane(torch.cuda.Stream(device) if cuda else None),
            prefetch=InlineLane(torch.cuda.Stream(device) if cuda else None),
        )

    @classmethod
    def serial(cls) -> Lanes:
        """Everything in the caller's thread, in order: a baseline, and for loaders that are bound to that thread."""
        lane = InlineLane()
        return cls(load=lane, copy=lane, distribute=lane, prefetch=lane)
