"""Reads and writes files in concurrent pieces, through the page cache or with direct I/O.

Each transfer is split at multiples of a fixed size (:data:`UNSTAGED` or :data:`STAGED`). Direct I/O moves whole pages
only, so an incomplete first or last page uses the page cache; the kernel keeps both coherent. ::

    host memory, address and offset aligned alike    file <--> memory, no copy
    host memory, not aligned                         file <--> buffer <--> memory
    accelerator memory                               file <--> buffer <--> device

Guarantees
    * When a transfer returns, its writes are in the file, and its reads are in memory, or queued on the calling
      thread's stream if the destination is on a device. When it raises, none of its pieces is still running.
    * System errors name the file. A file that is too short is an error, never zeros.
    * No file stays open, so a model of thousands of blocks does not reach the limit of open files.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload.storage.buffer import PAGE_BYTES, host_buffer, page_lock, view_memory
from offload.storage.page_cache import CacheUsage, PageCache
from pipe.threads import Future, Threads

__all__ = [
    "STAGED",
    "UNSTAGED",
    "CudaLink",
    "Link",
    "Staging",
    "StoredFile",
    "TransferLimits",
    "Transfers",
    "move_all",
    "open_link",
]


# --- A file that holds a block: which one it is, however its name changes --------------------------------------------


@dataclass(frozen=True)
class StoredFile:
    """A file, by its path and, once it exists, by its number."""

    path: Path
    #: Device and number of the file; None: any file of that name.
    inode: tuple[int, int] | None = None

    def as_it_is(self) -> StoredFile:
        """This file, and no other that later takes its name."""
        found = os.stat(self.path)
        return replace(self, inode=(found.st_dev, found.st_ino))

    def open(self, flags: int = 0) -> int:
        """Opens the file. Raises FileNotFoundError if another one has its name, as if it was removed."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        found = os.fstat(fd)
        if self.inode is None or self.inode == (found.st_dev, found.st_ino):
            return fd
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "the file was moved, and another one has its name", str(self.path))

    def map(self, nbytes: int) -> Tensor:
        """A shared mapping of the first ``nbytes``, flat, uint8, which outlives the file. Raises OSError."""
        fd = self.open()
        try:
            # torch takes names in UTF-8 only, and this one is that of the open file.
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(fd)


# --- A pool of page-locked host buffers between files and memory that direct I/O cannot reach ------------------------
#
# That is an accelerator's memory, and unaligned host memory. A buffer is reused once the copy out of it is done, so
# only a few pieces are page-locked, never a model.
#
# ::
#
#     file --> buffer --> device      read: a pool thread fills the buffer, the stream of the lane copies it
#     file <-- buffer <-- device      write: the reverse

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


@dataclass(frozen=True)
class TransferLimits:
    """Bytes of a request, and concurrent requests to one disk."""

    piece_bytes: int
    in_flight: int


#: Between file and memory without a buffer. A fourth of this keeps a disk busy if the cores are idle. But layers that
#: compute on all cores delay the thread that requests the next piece by some milliseconds, for which the disk needs
#: queued work.
UNSTAGED = TransferLimits(16 << 20, 4)
#: Through as many buffers.
STAGED = TransferLimits(8 << 20, 4)
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


@dataclass(frozen=True)
class _Piece:
    """Bytes ``[begin, end)`` of a file."""

    begin: int
    end: int
    direct: bool

    @property
    def flags(self) -> int:
        """With which its file is opened."""
        return os.O_DIRECT if self.direct else 0


def _pieces(begin: int, end: int, piece_bytes: int, *, direct: bool) -> Iterator[_Piece]:
    """Splits a transfer."""
    first = min(end, -(-begin // PAGE_BYTES) * PAGE_BYTES) if direct else begin
    last = max(first, end // PAGE_BYTES * PAGE_BYTES) if direct else end
    if begin < first:
        yield _Piece(begin, first, False)
    while first < last:
        until = min(last, (first // piece_bytes + 1) * piece_bytes)
        yield _Piece(first, until, direct)
        first = until
    if last < end:
        yield _Piece(last, end, False)


class Transfers:
    """Reads and writes the files of one tier."""

    def __init__(self, cache: PageCache, link: Link) -> None:
        self.cache = cache
        self._staged = STAGED
        self.staging = Staging(link, STAGED.in_flight, STAGED.piece_bytes)
        self._io_threads = Threads(max(STAGED.in_flight, UNSTAGED.in_flight) - 1, "offload-io")

    def limit_staging(self, nbytes: int) -> None:
        """Makes all staging buffers together take at most ``nbytes``, or few pages; before the first transfer."""
        piece = nbytes // STAGED.in_flight // PAGE_BYTES * PAGE_BYTES
        self._staged = TransferLimits(min(max(piece, DIRECT_LEAST_BYTES), STAGED.piece_bytes), STAGED.in_flight)
        self.staging = Staging(self.staging.link, STAGED.in_flight, self._staged.piece_bytes)

    def read(self, file: Path | StoredFile, destination: Tensor, offset: int, usage: CacheUsage | None = None) -> None:
        """Fills ``destination`` (flat, uint8) with the bytes of a file from ``offset`` on.

        Raises FileNotFoundError if the file was removed, another OSError if it cannot be read or is too short.
        """
        self._move(file, destination, offset, usage, write=False)

    def write(self, file: Path | StoredFile, source: Tensor, offset: int, usage: CacheUsage | None = None) -> None:
        """Writes ``source`` (flat, uint8) to a file, from ``offset`` on; raises as :meth:`read` does."""
        self._move(file, source, offset, usage, write=True)

    def _move(
        self, file: Path | StoredFile, tensor: Tensor, offset: int, usage: CacheUsage | None, *, write: bool
    ) -> None:
        nbytes = tensor.numel()
        if not nbytes:
            return
        file = file if isinstance(file, StoredFile) else StoredFile(file)
        on_device = self.staging.link.is_on_device(tensor)
        direct = nbytes >= DIRECT_LEAST_BYTES and self.cache.direct(usage)
        staged = on_device or (direct and (tensor.data_ptr() - offset) % PAGE_BYTES != 0)
        limits = self._staged if staged else UNSTAGED
        pieces = [_Piece(offset, offset + nbytes, False)]
        if direct or on_device:  # the page cache needs one call only
            pieces = list(_pieces(offset, offset + nbytes, limits.piece_bytes, direct=direct))
        # The caller moves a single piece itself: waking a thread takes longer than reading the pages of a bias.
        io_threads = self._io_threads if len(pieces) > 1 else None
        pending: deque[_PieceTransfer] = deque()
        with contextlib.ExitStack() as stack:
            descriptors = {
                flags: stack.enter_context(_opened(file, flags)) for flags in dict.fromkeys(p.flags for p in pieces)
            }
            try:
                for piece in pieces:
                    part = tensor[piece.begin - offset : piece.end - offset]
                    buffer = None
                    if on_device or (staged and piece.direct):
                        while (buffer := self.staging.acquire_buffer(wait=not pending)) is None:
                            pending.popleft().complete()
                    pending.append(_PieceTransfer(self.staging, part, buffer, on_device=on_device, write=write))
                    move = partial(_move_piece, file, descriptors[piece.flags], piece, write)
                    pending[-1].start(io_threads, move)
                    if len(pending) == limits.in_flight:
                        pending.popleft().complete()
                while pending:
                    pending.popleft().complete()
            finally:
                # Without this, threads go on with a failed transfer while its memory is reused.
                for transfer in pending:
                    transfer.cancel()
        self.cache.count(nbytes)


def _move_piece(file: StoredFile, fd: int, piece: _Piece, write: bool, memory: memoryview) -> None:
    path, call, begin = file.path, os.pwritev if write else os.preadv, piece.begin
    if not piece.direct:
        move_all(call, fd, memory, begin, path)
    elif (moved := _moved(call, fd, memory, begin, path)) < len(memory):
        # A direct call moves less only at the end of the file, where move_all raises.
        with _opened(file) as cached:
            move_all(call, cached, memory[moved:], begin + moved, path)


class _PieceTransfer:
    """The transfer of one piece, with its staging buffer if it needs one."""

    def __init__(self, staging: Staging, part: Tensor, buffer: Tensor | None, *, on_device: bool, write: bool) -> None:
        self._staging = staging
        self._part = part
        self._buffer = buffer
        self._on_device = on_device
        self._write = write
        self._fence: Fence | None = None
        self._job: Future[None] | None = None

    def start(self, io_threads: Threads | None, move: Callable[[memoryview], None]) -> None:
        """Starts it; ``move`` copies host memory to or from the file."""
        part, buffer = self._part, None if self._buffer is None else self._buffer[: self._part.numel()]
        if buffer is not None and self._on_device and self._write:
            self._fence = self._staging.link.copy(buffer, part)

        def work() -> None:
            if buffer is None:
                move(view_memory(part))
                return
            if self._fence is not None:
                # Device -> buffer. Without this, the buffer's previous contents are written to the file.
                self._fence()
            elif self._write:
                _copy(buffer, part)
            move(view_memory(buffer))
            if not self._on_device and not self._write:
                _copy(part, buffer)

        self._job = Future(work) if io_threads is None else io_threads.offer(work)

    def complete(self) -> None:
        """Waits for it; raises what it raised."""
        try:
            assert self._job is not None
            self._job.run_or_wait()
            if self._buffer is not None and self._on_device and not self._write:
                self._fence = self._staging.link.copy(self._part, self._buffer[: self._part.numel()])
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Returns once only a device copy may still run, whether the piece was finished or not."""
        if self._job is not None:
            # The job refers to this object. Without breaking the cycle, its tensor lives until garbage is collected.
            job, self._job = self._job, None
            job.cancel()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            # Buffer -> device. Without this fence, the next piece overwrites the buffer while the device reads it.
            self._staging.release(buffer, self._fence)


def _copy(destination: Tensor, source: Tensor) -> None:
    """A copy without the interpreter lock and without torch's threads."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())


@contextlib.contextmanager
def _opened(file: StoredFile, flags: int = 0) -> Iterator[int]:
    fd = file.open(flags)
    try:
        yield fd
    finally:
        os.close(fd)
