"""Lanes: ordered queues of copies that run beside compute, and the waits that keep both in step.

A copy is submitted as a function and runs later, in order, on an I/O thread (:class:`ThreadLane`) or on a CUDA stream
(:class:`StreamLane`). Each submission returns an :class:`Arrival`; nobody touches what the copy writes before
``arrival.wait()``, and nobody overwrites what it reads before that.

Guarantees
    * ``wait()`` returns after the copy, or raises what the copy raised, every time it is called.
    * A copy starts only after the arrivals it was submitted ``after``, and after everything that compute had been given
      when it was submitted (on a stream by an event, on a thread because compute is the submitting thread).
    * After ``close()`` copies that were submitted still finish. A thread is not waited for, since its jobs hold all
      that they touch; a stream is, since the memory that its copies touch may go as soon as the model has gone.

Assumes
    * The engine never relies on the order of two copies unless it says so with ``after``. The lane used by tests runs
      copies only when somebody waits for them, in an order an adversary chooses.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.storage.io_threads import Future, IOThreads

__all__ = ["Arrival", "Lane", "Lanes", "StreamLane", "ThreadLane", "error_context", "open_lanes"]


class Arrival(ABC):
    """The end of one copy."""

    @abstractmethod
    def wait(self) -> None:
        """Makes compute wait for the copy. Raises what the copy raised."""

    @abstractmethod
    def synchronize(self) -> None:
        """Makes the host wait for the copy: after it, any code may read what was written. Raises what it raised."""


class Lane(ABC):
    """An ordered queue of copies."""

    @abstractmethod
    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy. ``token`` names it in errors and traces."""

    @abstractmethod
    def wait_idle(self) -> None:
        """Makes the host wait for all copies that were submitted, whatever came of them."""

    @abstractmethod
    def close(self) -> None:
        """Takes no more copies; those that were submitted still finish. Never waits for a thread."""


@contextlib.contextmanager
def error_context(what: str) -> Iterator[None]:
    """Says in an error of the system what was being copied, and from or to which place."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror or error}") from error


# --- the CPU twin: an I/O thread ------------------------------------------------------------------------------------


class _Future(Arrival):
    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    synchronize = wait


class ThreadLane(Lane):
    """Copies on one I/O thread. File reads, writes and large tensor copies release the interpreter lock.

    Between a file and a CUDA device nobody but a thread can wait for the read; there the thread also drives a stream of
    its own and waits for it, so that an arrival means that the bytes are on the device.
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
                # The thread is a host. Without this, it reads what a stream has not written yet: an update takes
                # gradients that are still on their way home.
                arrival.synchronize()
            # Grad mode belongs to a thread. Without this, in-place writes into what requires a gradient are refused.
            with torch.no_grad():
                if stream is None or given is None:
                    copy()
                    return
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    # Compute -> lane. Without this, a slot is overwritten while kernels given earlier still read it.
                    stream.wait_event(given)
                    copy()
                    # Stream -> thread. Without this, an arrival says that bytes are there which are on their way.
                    stream.synchronize()

        return _Future(self._thread.submit(job))

    def wait_idle(self) -> None:
        """Waits for the thread."""
        self._thread.wait_idle()

    def close(self) -> None:
        """The thread ends after what was submitted.

        It is not waited for: finalizers call this, and they run wherever garbage is collected, also in a thread that is
        just starting and holds what an ending thread needs.
        """
        self._thread.close()


# --- CUDA: a side stream --------------------------------------------------------------------------------------------


class _Event(Arrival):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        # Lane -> compute. Without this, kernels read bytes that have not arrived.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        # Lane -> host. Without this, the host reads, or gives away, what is still being copied.
        self._event.synchronize()


class StreamLane(Lane):
    """Copies on a side stream of a CUDA device; in a step the host never waits for it.

    The tensors that a copy touches are kept by its submitter until it has waited for the arrival, so the caching
    allocator cannot hand their memory to another stream meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a copy on the stream."""
        # Compute -> lane. Without this, a slot is overwritten while kernels given earlier still read it, and gradients
        # leave before they are complete.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            for arrival in after:
                # Other lane -> this one. Without this, it reads what is still on its way there.
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
        """Waits for the stream, at the end of the model.

        Without this, a load that nobody used (a backward that never came) is still being copied while the home that it
        reads is unlocked and the slot that it fills belongs to somebody else.
        """
        self._stream.synchronize()


# --- what a model needs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lanes:
    """The three queues of a model. They are apart so that a long copy in one never delays another's short one."""

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
    """Lanes for a compute device. ``blocking_io``: to read the home blocks the caller (a file) and needs a thread."""
    if device.type == "cuda" and not blocking_io:
        return Lanes(StreamLane(device), StreamLane(device), StreamLane(device))
    return Lanes(ThreadLane("load", device), ThreadLane("drain", device), ThreadLane("boundary", device))
