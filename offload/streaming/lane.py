"""Ordered queues of copies that overlap with compute, on a CUDA stream or an I/O thread, and their synchronization.

A copy is submitted as a function and runs later, in order, on an I/O thread (:class:`ThreadLane`) or on a CUDA stream
(:class:`StreamLane`). Each submission returns an :class:`Arrival`. Before ``arrival.wait()``, compute neither uses the
copy's destination nor overwrites its source.

Guarantees
    * ``wait()`` returns after the copy, or raises what the copy raised, at every call.
    * A copy starts only after the arrivals in ``after``, and after all compute queued before its submission (on a
      stream by an event, on a thread because compute is the submitting thread).
    * After ``close()`` submitted copies still finish. Threads are not joined, since their jobs keep all memory alive
      that they use; streams are synchronized, since that memory may be freed with the model.

Assumes
    * The engine relies on the order of two copies only where ``after`` states it. The lane in tests runs a copy only
      when it is waited for, in an adversarial order.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.storage.io_threads import Future, IOThreads

__all__ = ["Arrival", "Clock", "Lane", "Lanes", "StreamLane", "ThreadLane", "error_context", "open_lanes"]


class Arrival(ABC):
    """The completion of one copy."""

    @abstractmethod
    def wait(self) -> None:
        """Makes compute wait for the copy. Raises what the copy raised."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks the host until the copy is done; any code may read its result then. Raises what the copy raised."""


class Lane(ABC):
    """An ordered queue of copies."""

    @abstractmethod
    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy. ``token`` names it in errors and traces."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Blocks the host until all submitted copies have ended, with or without errors."""

    @abstractmethod
    def close(self) -> None:
        """Refuses further copies; submitted ones still finish. Never waits for a thread."""


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Prefixes a system error with what was copied, and from or to which storage."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror or error}") from error


# --- I/O threads ----------------------------------------------------------------------------------------------------


class _Future(Arrival):
    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    synchronize = wait


class ThreadLane(Lane):
    """Copies on one I/O thread. File reads, writes and large tensor copies release the interpreter lock.

    Between a file and a CUDA device the thread waits for the file and for a stream of its own, so an arrival means that
    the bytes are on the device.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._thread = IOThreads(1, f"offload-{name}")
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy on the thread."""
        stream, device = self._stream, self._device
        given = None if stream is None else torch.cuda.current_stream(device).record_event()

        def job() -> None:
            for arrival in after:
                # Without this, the thread reads what a stream has not written yet, such as an update gradients that
                # are still being stored.
                arrival.synchronize()
            # Grad mode is per thread. Without this, in-place writes into what requires a gradient are refused.
            with torch.no_grad():
                if stream is None or given is None:
                    copy()
                    return
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    # Compute -> lane. Without this, a slot is overwritten while kernels queued earlier still read it.
                    stream.wait_event(given)
                    copy()
                    # Stream -> thread. Without this, the arrival completes before the copy.
                    stream.synchronize()

        return _Future(self._thread.submit(job))

    def wait_idle(self) -> None:
        """Waits for the thread."""
        self._thread.wait_idle()

    def close(self) -> None:
        """Ends the thread after all submitted copies.

        Does not join it: finalizers call this, and they run wherever garbage is collected, even in a thread that is
        starting and holds a lock that an ending thread needs.
        """
        self._thread.close()


# --- CUDA streams ---------------------------------------------------------------------------------------------------


class _Event(Arrival):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        # Lane -> compute. Without this, kernels read bytes that are not copied yet.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        # Lane -> host. Without this, the host reads or frees memory that is still being copied.
        self._event.synchronize()


class StreamLane(Lane):
    """Copies on a side stream of a CUDA device; within a step the host never waits for it.

    The submitter keeps a copy's tensors until it has waited for the arrival, so the caching allocator cannot reuse
    their memory on another stream before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy on the stream."""
        # Compute -> lane. Without this, a slot is overwritten while kernels queued earlier still read it, and gradients
        # are copied before they are complete.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            for arrival in after:
                # Other lane -> this one. Without this, it reads what the other lane is still copying.
                arrival.wait()
            with torch.profiler.record_function(token):
                copy()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Event(event, self._device)

    def wait_idle(self) -> None:
        """Waits for the stream."""
        self._stream.synchronize()

    def close(self) -> None:
        """Waits for the stream, when the model is closed.

        Without this, an unused load (a backward that never ran) is still copied while its source is unlocked and its
        slot is reused.
        """
        self._stream.synchronize()


# --- the lanes of a model -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes:
    """The three queues of a model, separate so that a long copy in one does not delay a short one in another."""

    load: Lane
    drain: Lane
    boundary: Lane

    def wait_idle(self) -> None:
        """Waits for all copies in all three."""
        for lane in (self.load, self.drain, self.boundary):
            lane.wait_idle()

    def close(self) -> None:
        """Closes all three."""
        for lane in (self.load, self.drain, self.boundary):
            lane.close()


def open_lanes(device: torch.device, *, blocking_io: bool) -> Lanes:
    """Lanes for a compute device. ``blocking_io``: reading the storage blocks its caller (a file), so use threads."""
    if device.type == "cuda" and not blocking_io:
        return Lanes(StreamLane(device), StreamLane(device), StreamLane(device))
    return Lanes(ThreadLane("load", device), ThreadLane("drain", device), ThreadLane("boundary", device))


#: Spans that a clock stores individually.
LATEST = 65


class Clock:
    """Measures the time of one kind of work: wall time on the CPU, CUDA events on a device.

    Stores the total, and the amount of work and the time of each of the latest spans.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._spans: deque[tuple[Any, Any, int, bool, bool]] = deque()
        self._first = True
        #: Amount and seconds of the latest spans, by whether they belong to the first step.
        self._samples: dict[bool, deque[tuple[int, float]]] = {first: deque(maxlen=LATEST) for first in (True, False)}

    @contextlib.contextmanager
    def span(self, amount: int = 0, *, continues: bool = False) -> Iterator[None]:
        """Measures the time inside, for ``amount`` bytes or rows. ``continues`` adds it to the previous span."""
        if self._device.type != "cuda":
            start, done = time.perf_counter(), 0
            try:
                yield
                done = amount  # a failed span is not a sample
            finally:
                self._count(time.perf_counter() - start, done, self._first, continues)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        done = 0
        begin.record(stream)
        try:
            yield
            done = amount
        finally:
            end.record(stream)
            self._spans.append((begin, end, done, self._first, continues))
            if len(self._spans) >= 4096:  # bounds the events of a long run
                self._wait_idle(wait=False)

    def _wait_idle(self, *, wait: bool) -> None:
        """Counts the spans that have ended, or ``wait``s for all of them; never waits within a step."""
        while self._spans:
            begin, end, amount, first, continues = self._spans[0]
            if not wait and not end.query():
                return
            # Without this, elapsed_time() raises, since the events have not been recorded yet.
            end.synchronize()
            self._count(begin.elapsed_time(end) / 1e3, amount, first, continues)
            self._spans.popleft()

    def _count(self, seconds: float, amount: int, first: bool, continues: bool = False) -> None:
        self._seconds += seconds
        if amount:
            samples = self._samples[first]
            before = samples.pop() if continues and samples else (0, 0.0)
            samples.append((before[0] + amount, before[1] + seconds))

    def first_step_ends(self) -> None:
        """Marks the end of the first step, whose spans are stored separately. Does not wait."""
        self._first = False

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        self._wait_idle(wait=True)
        return self._seconds

    def seconds_each(self) -> float:
        """Seconds per unit of work: the median over the latest spans, weighted by their amounts of work.

        The median ignores spans that other processes disturbed. Spans of the first step are ignored once there are
        later ones. 0 without spans.
        """
        self._wait_idle(wait=True)
        samples = sorted((seconds / amount, amount) for amount, seconds in self._samples[False] or self._samples[True])
        half, below = sum(amount for _, amount in samples) / 2, 0
        for k, (each, amount) in enumerate(samples):
            below += amount
            if below == half:
                return (each + samples[k + 1][0]) / 2
            if below > half:
                return each
        return 0.0
