"""Staging: a few buffers in host memory, between a file and what a file cannot be read into straight.

That is the memory of an accelerator, and host memory that is not aligned as a direct transfer needs it. Buffers are
used again as soon as the copy out of them is done, so what is page-locked is a few pieces, never a model.

::

    file --> buffer --> device          read: a thread of the thread pool fills the buffer, the lane's stream empties it
    file <-- buffer <-- device          write: the other way

How bytes get from a buffer to a device is a :class:`Link`. The CUDA one uses events only. Tests have one whose copies
run late, so that a buffer that is used again too early shows without an accelerator.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from offload.storage.buffer import host_buffer, page_lock

__all__ = ["CudaLink", "Fence", "Link", "NoLink", "Staging", "open_link"]

#: Waits on the host until a copy is done.
Fence = Callable[[], None]


class Link(ABC):
    """How bytes travel between host buffers and the compute device."""

    @abstractmethod
    def is_far(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the other side, so that calls of the system cannot reach it."""

    @abstractmethod
    def prepare(self, buffer: Tensor) -> None:
        """Makes a new buffer ready for copies."""

    @abstractmethod
    def copy(self, destination: Tensor, source: Tensor) -> Fence:
        """Starts a copy behind what the calling thread was given before; the fence waits for its end."""


class NoLink(Link):
    """The compute device is the CPU: everything is near."""

    def is_far(self, tensor: Tensor) -> bool:
        """Never."""
        return False

    def prepare(self, buffer: Tensor) -> None:
        """Nothing to do."""

    def copy(self, destination: Tensor, source: Tensor) -> Fence:
        """Is never called."""
        raise AssertionError("no tensor is far")


class CudaLink(Link):
    """Page-locked buffers, and copies on the current stream of the thread that asks for them."""

    def is_far(self, tensor: Tensor) -> bool:
        """Whether it is on an accelerator."""
        return tensor.device.type != "cpu"

    def prepare(self, buffer: Tensor) -> None:
        """Page-locks it, or warns."""
        page_lock(buffer, "staging between disk and device")

    def copy(self, destination: Tensor, source: Tensor) -> Fence:
        """Enqueues the copy, and an event behind it."""
        destination.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream((destination if destination.is_cuda else source).device))
        return event.synchronize


def open_link(device: torch.device) -> Link:
    """The link to a compute device."""
    return CudaLink() if device.type == "cuda" else NoLink()


class Staging:
    """At most ``count`` buffers of ``buffer_bytes``, made when they are needed, shared by the lanes of a tier.

    Guarantees
        * A buffer is handed out only after the copy that it was last given back with.

    Assumes
        * Nobody waits for a buffer while holding one. Without this, two lanes could wait for each other.
    """

    def __init__(self, link: Link, count: int, buffer_bytes: int) -> None:
        self.link = link
        self._buffer_bytes = buffer_bytes
        self._unmade = count
        self._free: deque[tuple[Tensor, Fence | None]] = deque()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers that exist and are not in use."""
        with self._changed:
            return len(self._free) * self._buffer_bytes

    def take(self, *, wait: bool) -> Tensor | None:
        """A buffer; if all are in use, waits for one, or returns None."""
        with self._changed:
            while not self._free and not self._unmade:
                if not wait:
                    return None
                self._changed.wait()
            made = not self._free
            if made:
                self._unmade -= 1
            else:
                buffer, fence = self._free.popleft()
        if made:
            try:
                buffer, fence = host_buffer(self._buffer_bytes), None
                self.link.prepare(buffer)
            except BaseException:
                with self._changed:
                    self._unmade += 1
                    self._changed.notify()
                raise
        if fence is not None:
            # Device copy -> next use of the buffer. Without this, a buffer is overwritten while it is being read.
            fence()
        return buffer

    def release(self, buffer: Tensor, fence: Fence | None = None) -> None:
        """Gives a buffer back; it is used again once ``fence`` is passed."""
        with self._changed:
            self._free.append((buffer, fence))
            self._changed.notify()
