"""Ordered queues of copies that overlap with compute, on a CUDA stream or an I/O thread, and their synchronization.

A copy is submitted as a function and runs later, in order, on an I/O thread (:class:`ThreadCopyLane`) or on a CUDA
stream (:class:`StreamCopyLane`). Each submission returns an :class:`Arrival`. Before ``arrival.wait()``, compute does
not use the copy's destination, nor overwrite its source.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from pipe.threads import Threads
from pipe.train.lane import InlineLane, Ticket

__all__ = [
    "Arrival",
    "CopyLane",
    "CopyLanes",
    "StreamCopyLane",
    "ThreadCopyLane",
    "error_context",
    "open_lanes",
    "threads_of_updates",
]


#: One thread of so many that layers compute with, also updates.
CORES_PER_UPDATE_THREAD = 4


class Arrival(Protocol):
    """The completion of one copy."""

    done: bool = True  #: whether it has ended on the host; what it gave to a stream may still run

    def wait(self) -> object:
        """Makes compute wait for the copy. Raises what the copy raised."""
        ...

    def synchronize(self) -> object:
        """Blocks the host until the copy is done; any code may read its result then. Raises what the copy raised."""
        ...


def threads_of_updates(device: torch.device) -> int | None:
    """Threads of an operation of an update on the host, while layers compute on ``device``; None: all.

    Updates are bound by memory, which few cores keep busy. Where layers compute on the same cores, see
    :class:`.Threads` for why there is one at best.
    """
    return max(1, torch.get_num_threads() // CORES_PER_UPDATE_THREAD) if device.type == "cpu" else None


class CopyLane(Protocol):
    """An ordered queue of copies."""

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy. ``token`` names it in errors and traces."""

    def wait_idle(self) -> None:
        """Blocks the host until all submitted copies have ended, with or without errors."""

    def close(self) -> None:
        """Refuses further copies; submitted ones still finish. Never waits for a thread."""


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Prefixes a system error with what was copied, and from or to which storage."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror or error}") from error


class ThreadCopyLane(CopyLane):
    """Copies on one I/O thread. File reads, writes and large tensor copies release the interpreter lock.

    Between a file and a CUDA device the thread waits for the file and for a stream of its own, so an arrival means that
    the bytes are on the device.

    ``operation_threads``: see :class:`.Threads`.
    """

    def __init__(self, name: str, device: torch.device, operation_threads: int | None = 1) -> None:
        self._threads = Threads(1, f"offload-{name}", operation_threads=operation_threads)
        self._device = device
        self._stream = _side_stream(device) if device.type == "cuda" else None

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

        return self._threads.submit(job)

    def wait_idle(self) -> None:
        """Waits for the thread."""
        self._threads.wait_idle()

    def close(self) -> None:
        """Ends the thread after all submitted copies, without joining it: finalizers may run in any thread."""
        self._threads.close()


class StreamCopyLane(CopyLane):
    """Copies on a side stream of a CUDA device; within a step the host waits neither for it nor for what it awaits.

    The submitter keeps a copy's tensors until it has waited for the arrival, so the caching allocator cannot reuse
    their memory on another stream before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _side_stream(device)
        self._lane = InlineLane(self._stream)
        #: For copies of what the host is still writing, such as an update: it begins them in place of the submitter.
        self._threads = Threads(1, "offload-copies")
        self._closed = False

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy on the stream."""
        given = torch.cuda.current_stream(self._device).record_event()

        def job() -> None:
            for arrival in after:
                # Other lane -> this one. Without this, it reads what the other lane is still copying.
                arrival.wait()
            # Compute -> lane. Without this, a slot is overwritten while kernels queued earlier still read it, and
            # gradients are copied before they are complete.
            self._stream.wait_event(given)
            with torch.no_grad(), torch.profiler.record_function(token):
                copy()
            if self._closed:
                # Without this, memory that only this job keeps is freed while it is copied.
                self._stream.synchronize()

        if all(arrival.done for arrival in after):
            return self._lane.submit(job)
        ticket: Ticket[None] = Ticket()
        self._threads.submit(partial(ticket.run, job, self._stream))
        return ticket

    def wait_idle(self) -> None:
        """Waits for the stream."""
        self._threads.wait_idle()
        self._stream.synchronize()

    def close(self) -> None:
        """Waits for the stream, when the model is closed.

        Without this, an unused load is still copied while its source is unlocked and its slot is reused.
        """
        self._closed = True
        self._threads.close()
        self._stream.synchronize()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream whose small kernels, such as norms between copies, do not queue behind those of layers."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class CopyLanes:
    """The three queues of a model, separate so that a long copy in one does not delay a short one in another."""

    load: CopyLane
    drain: CopyLane
    boundary: CopyLane

    def wait_idle(self) -> None:
        """Waits for all copies in all three."""
        for lane in (self.load, self.drain, self.boundary):
            lane.wait_idle()

    def close(self) -> None:
        """Closes all three."""
        for lane in (self.load, self.drain, self.boundary):
            lane.close()


def open_lanes(device: torch.device, *, blocking_io: bool) -> CopyLanes:
    """Lanes for a compute device. ``blocking_io``: reading the storage blocks its caller (a file), so use threads."""
    if device.type == "cuda" and not blocking_io:
        return CopyLanes(*(StreamCopyLane(device) for _ in range(3)))
    return CopyLanes(*(ThreadCopyLane(name, device) for name in ("load", "drain", "boundary")))
