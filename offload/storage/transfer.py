"""Reads and writes files in concurrent pieces, through the page cache or with direct I/O.

Each transfer is split at multiples of a fixed size (:data:`UNSTAGED_BYTES` or :data:`STAGED_BYTES`). Direct I/O moves
whole pages only, so an incomplete first or last page uses the page cache; the kernel keeps both coherent. ::

    host memory, address and offset aligned alike    file <--> memory, no copy
    host memory, not aligned                         file <--> buffer <--> memory
    accelerator memory                               file <--> buffer <--> device

Guarantees
    * When a transfer returns, its writes are in the file, and its reads are in memory, or queued on the calling
      thread's stream if the destination is on a device. When it raises, none of its pieces is still running.
    * System errors name the file. A file that is too short is an error, never zeros.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import LifoQueue

import torch
from torch import Tensor

from offload.storage.buffer import PAGE_BYTES, host_buffer, page_lock, view_memory
from offload.storage.page_cache import CacheUsage, PageCache
from pipe.threads import Threads

__all__ = [
    "CudaLink",
    "Link",
    "Staging",
    "Transfers",
    "move_all",
]


#: Blocks the host until a copy is done.
Fence = Callable[[], None]
#: Enqueues a copy to the first tensor from the second one; the fence waits for it.
Copy = Callable[[Tensor, Tensor], Fence]


class Link:
    """Copies between host buffers and the compute device. This one is for the CPU, where no tensor is on a device."""

    def prepare(self, buffer: Tensor) -> None:
        """Prepares a new buffer for copies."""

    def copier(self, tensor: Tensor) -> Copy | None:
        """What copies between buffers and ``tensor``, in any thread, after what this one has queued; or None."""
        return None


class CudaLink(Link):
    """Page-locked buffers, copied on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, buffer: Tensor) -> None:
        """Page-locks it, or warns."""
        page_lock(buffer, "staging between disk and device", self._device)

    def copier(self, tensor: Tensor) -> Copy | None:
        """See :meth:`Link.copier`."""
        if tensor.device.type == "cpu":
            return None
        stream = torch.cuda.current_stream(tensor.device)

        def copy(destination: Tensor, source: Tensor) -> Fence:
            event = torch.cuda.Event()
            with torch.cuda.stream(stream):
                destination.copy_(source, non_blocking=True)
            event.record(stream)
            return event.synchronize

        return copy


class Staging:
    """Page-locked host buffers between files and what direct I/O cannot reach: a device, and unaligned host memory.

    ::

        file --> buffer --> device      read: a pool thread fills the buffer, the stream of the lane copies it
        file <-- buffer <-- device      write: the reverse

    At most ``count`` of ``buffer_bytes``, allocated on demand, shared by the lanes of a tier. A buffer is reused once
    the copy out of it is done, so only a few pieces are page-locked, never a model.

    :meth:`acquire_buffer` returns a buffer only after the fence that it was released with. No caller may wait for a
    buffer while holding one: two lanes could deadlock.
    """

    def __init__(self, link: Link, count: int, buffer_bytes: int) -> None:
        self.link = link
        self._buffer_bytes = buffer_bytes
        #: Buffers and their fences; None: one that is not allocated yet, taken after those that are.
        self._free: LifoQueue[tuple[Tensor | None, Fence | None]] = LifoQueue()
        for _ in range(count):
            self._free.put((None, None))

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated buffers that are not in use."""
        return sum(buffer is not None for buffer, _ in [*self._free.queue]) * self._buffer_bytes

    def acquire_buffer(self) -> Tensor:
        """Takes a buffer; if all are in use, waits for one."""
        buffer, fence = self._free.get()
        if buffer is None:
            try:
                buffer = host_buffer(self._buffer_bytes)
                self.link.prepare(buffer)
            except BaseException:
                self.release(None)
                raise
        if fence is not None:
            # Device copy -> next use of the buffer. Without this, a buffer is overwritten while it is read.
            fence()
        return buffer

    def release(self, buffer: Tensor | None, fence: Fence | None = None) -> None:
        """Returns a buffer; it is reused after ``fence``."""
        self._free.put((buffer, fence))


#: Concurrent requests to one disk.
IN_FLIGHT = 4
#: Bytes of a request between file and memory without a buffer. A fourth of this keeps a disk busy if the cores are
#: idle. But layers that compute on all cores delay the thread that requests the next piece by some milliseconds, for
#: which the disk needs queued work.
UNSTAGED_BYTES = 16 << 20
#: Bytes of one through a buffer.
STAGED_BYTES = 8 << 20
#: Smaller transfers use the page cache: they are bound by the disk's latency, not by its bandwidth.
DIRECT_LEAST_BYTES = 256 << 10


def move_all(call: Callable[..., int], fd: int, memory: memoryview, offset: int, path: object) -> None:
    """Calls ``os.preadv`` or ``os.pwritev`` until all of ``memory`` is moved; one call may move less."""
    done = 0
    while done < len(memory):
        moved = _moved(call, fd, memory[done:], offset + done, path)
        if moved == 0:
            raise OSError(f"{path}: the file ends after {offset + done:,} bytes, expected {offset + len(memory):,}")
        done += moved


def _moved(call: Callable[..., int], fd: int, memory: memoryview, offset: int, path: object) -> int:
    try:
        return call(fd, [memory], offset)
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from error


def _pieces(begin: int, end: int, piece_bytes: int, *, direct: bool) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of each piece of a transfer, and whether it is direct: all but incomplete pages are."""
    pages = range(-(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES) if direct else range(0)
    ends = {begin, end, *range(-(-begin // piece_bytes) * piece_bytes, end, piece_bytes)}
    ends |= {pages.start, pages.stop} if direct else set()
    for first, last in itertools.pairwise(sorted(ends)):
        yield first, last, first in pages


class Transfers:
    """Reads and writes the files of one tier."""

    def __init__(self, cache: PageCache, link: Link) -> None:
        self.cache = cache
        self._staged_bytes = STAGED_BYTES
        self.staging = Staging(link, IN_FLIGHT, STAGED_BYTES)
        self._io_threads = Threads(IN_FLIGHT - 1, "offload-io")

    def limit_staging(self, nbytes: int) -> None:
        """Makes all staging buffers together take at most ``nbytes``, or few pages; before the first transfer."""
        piece = nbytes // IN_FLIGHT // PAGE_BYTES * PAGE_BYTES
        self._staged_bytes = min(max(piece, DIRECT_LEAST_BYTES), STAGED_BYTES)
        self.staging = Staging(self.staging.link, IN_FLIGHT, self._staged_bytes)

    def move(self, fd: int, tensor: Tensor, offset: int, path: Path, usage: CacheUsage, *, write: bool) -> None:
        """Reads ``tensor`` (flat, uint8) from an open file, from ``offset`` on, or writes it there.

        Raises OSError, which calls it ``path``, if it cannot be read or written, or is too short.
        """
        nbytes, end = tensor.numel(), offset + tensor.numel()
        if not nbytes:
            return
        copy = self.staging.link.copier(tensor)
        on_device = copy is not None
        direct = nbytes >= DIRECT_LEAST_BYTES and self.cache.direct(usage)
        staged = on_device or (direct and (tensor.data_ptr() - offset) % PAGE_BYTES != 0)
        piece_bytes = self._staged_bytes if staged else UNSTAGED_BYTES
        # The page cache needs one call only.
        pieces = deque(_pieces(offset, end, piece_bytes if direct or on_device else end, direct=direct))

        def work() -> None:
            while True:
                try:
                    piece = pieces.popleft()
                except IndexError:
                    return
                move(*piece)

        def move(begin: int, end: int, direct: bool) -> None:
            part = tensor[begin - offset : end - offset]
            call = partial(_move_piece, fd, bypass if direct else fd, begin, path, write)
            try:
                if on_device or (staged and direct):
                    self._move_staged(part, call, copy, write=write)
                else:
                    call(view_memory(part))
            except BaseException:
                pieces.clear()
                raise

        # The same file, past the page cache.
        bypass = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC) if direct else fd
        try:
            # The caller moves a single piece itself: waking a thread takes longer than reading the pages of a bias.
            helpers = [self._io_threads.offer(work) for _ in range(min(IN_FLIGHT, len(pieces)) - 1)]
            try:
                work()
                while helpers:
                    helpers[-1].run_or_wait()
                    helpers.pop()
            finally:
                while helpers:
                    # Without this, threads go on with a failed transfer while its memory is reused.
                    helpers.pop().cancel()
        finally:
            if bypass != fd:
                os.close(bypass)
        self.cache.count(nbytes)

    def _move_staged(self, part: Tensor, call: Callable[[memoryview], None], copy: Copy | None, *, write: bool) -> None:
        """Moves a piece through a buffer. ``copy``: see :meth:`Link.copier`."""
        buffer, fence = self.staging.acquire_buffer(), None
        try:
            piece = buffer[: part.numel()]
            if not write:
                call(view_memory(piece))
            destination, source = (piece, part) if write else (part, piece)
            if copy is None:
                # Without the interpreter lock and torch's threads.
                ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())
            else:
                fence = copy(destination, source)
            if write:
                if fence is not None:
                    # Device -> buffer. Without this, the buffer's previous contents are written to the file.
                    fence()
                call(view_memory(piece))
        finally:
            # Buffer -> device. Without this fence, the next piece overwrites the buffer while the device reads it.
            self.staging.release(buffer, fence)


def _move_piece(fd: int, used: int, begin: int, path: Path, write: bool, memory: memoryview) -> None:
    """Moves a piece by the descriptor ``used``, which may be one for direct calls; by ``fd`` what that leaves."""
    call = os.pwritev if write else os.preadv
    # A direct call moves less only at the end of the file, where move_all raises.
    moved = 0 if used == fd else _moved(call, used, memory, begin, path)
    move_all(call, fd, memory[moved:], begin + moved, path)
