"""A pool of page-locked host buffers between files and memory that direct I/O cannot reach.

That is an accelerator's memory, and unaligned host memory. A buffer is reused once the copy out of it is done, so only
a few pieces are page-locked, never a model.

::

    file --> buffer --> device          read: a pool thread fills the buffer, the lane's stream copies it to the device
    file <-- buffer <-- device          write: the reverse
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from offload.storage.buffer import host_buffer, page_lock

__all__ = ["CudaLink", "Fence", "Link", "Staging", "open_link"]

#: Blocks the host until a copy is done.
Fence = Callable[[], None]


class Link:
    """Copies between host buffers and the compute device. This one is for the CPU, where no tensor is on a device."""

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the device, where system calls cannot reach it."""
        return False

    def prepare(self, buffer: Tensor) -> None:
        """Prepares a new buffer for copies."""

    def copy(self, destination: Tensor, source: Tensor) -> Fence:
        """Enqueues a copy after the calling thread's earlier ones; the fence waits for it."""
        raise AssertionError("no tensor is on a device")


class CudaLink(Link):
    """Page-locked buffers, copied on the current stream of the calling thread."""

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether it is on an accelerator."""
        return tensor.device.type != "cpu"

    def prepare(self, buffer: Tensor) -> None:
        """Page-locks it, or warns."""
        page_lock(buffer, "staging between disk and device")

    def copy(self, destination: Tensor, source: Tensor) -> Fence:
        """Enqueues the copy and an event after it."""
        destination.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream((destination if destination.is_cuda else source).device))
        return event.synchronize


def open_link(device: torch.device) -> Link:
    """The link to a compute device."""
    return CudaLink() if device.type == "cuda" else Link()


class Staging:
    """At most ``count`` buffers of ``buffer_bytes``, allocated on demand, shared by the lanes of a tier.

    :meth:`acquire_buffer` returns a buffer only after the fence that it was released with. No caller may wait for a
    buffer while holding one: two lanes could deadlock.
    """

    def __init__(self, link: Link, count: int, buffer_bytes: int) -> None:
        self.link = link
        self._buffer_bytes = buffer_bytes
        self._uncreated = count
        self._free: deque[tuple[Tensor, Fence | None]] = deque()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated buffers that are not in use."""
        with self._changed:
            return len(self._free) * self._buffer_bytes

    def acquire_buffer(self, *, wait: bool) -> Tensor | None:
        """Takes a buffer; if all are in use, waits for one, or returns None."""
        with self._changed:
            while not self._free and not self._uncreated:
                if not wait:
                    return None
                self._changed.wait()
            made = not self._free
            if made:
                self._uncreated -= 1
            else:
                buffer, fence = self._free.popleft()
        if made:
            try:
                buffer, fence = host_buffer(self._buffer_bytes), None
                self.link.prepare(buffer)
            except BaseException:
                with self._changed:
                    self._uncreated += 1
                    self._changed.notify()
                raise
        if fence is not None:
            # Device copy -> next use of the buffer. Without this, a buffer is overwritten while it is read.
            fence()
        return buffer

    def release(self, buffer: Tensor, fence: Fence | None = None) -> None:
        """Returns a buffer; it is reused after ``fence``."""
        with self._changed:
            self._free.append((buffer, fence))
            self._changed.notify()
