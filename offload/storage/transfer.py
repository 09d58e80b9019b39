"""Bytes between files and memory, in pieces: through the page cache or past it, several at a time.

Each transfer is cut at multiples of a fixed size (:data:`STRAIGHT` or :data:`STAGED`). The first and the last page of a
direct one go through the page cache where they are not whole, since a disk takes whole pages only; the kernel keeps
both ways in step. ::

    memory, where the system can reach it and address and offset agree    file <--> memory, no copy at all
    memory that is not aligned                                            file <--> buffer <--> memory
    a compute device                                                      file <--> buffer <--> device

Guarantees
    * When a transfer returns, its reads are in memory, or queued on the calling thread's stream where the destination
      is a device; its writes are in the file. When it raises, nothing of it is going on any more.
    * Errors of the system name the file. A file that is shorter than it must be is an error, never zeros.
    * No file stays open: a model of thousands of blocks does not reach the limit of open files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from offload.storage.buffer import PAGE_BYTES, view_memory
from offload.storage.io_thread_pool import IOThreadPool, PooledCall
from offload.storage.page_cache import Claim, PageCache
from offload.storage.staging import Fence, Link, Staging

__all__ = ["STAGED", "STRAIGHT", "Cut", "Transfers", "move_all"]

T = TypeVar("T")


@dataclass(frozen=True)
class Cut:
    """Bytes of a request, and requests at a time."""

    piece_bytes: int
    in_flight: int


#: Straight between file and memory. A disk whose reader does nothing else is kept busy by a fourth of this. But layers
#: that compute on all cores keep the thread that asks for the next piece waiting, some milliseconds at a time, and the
#: disk must have work left until then.
STRAIGHT = Cut(16 << 20, 4)
#: Through buffers, of which there are as many.
STAGED = Cut(8 << 20, 4)
#: Transfers that are smaller are left to the page cache: they wait for a disk's latency, not for its bandwidth.
DIRECT_LEAST_BYTES = 256 << 10


def move_all(call: Callable[..., int], fd: int, memory: memoryview, offset: int, path: object) -> None:
    """Calls ``os.preadv`` or ``os.pwritev`` until all bytes of ``memory`` have moved; one call may move fewer."""
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
class _ParamBlock:
    """Bytes ``[begin, end)`` of a file."""

    begin: int
    end: int
    direct: bool


def _pieces(begin: int, end: int, piece_bytes: int, *, direct: bool) -> Iterator[_ParamBlock]:
    """Cuts a transfer."""
    first = min(end, -(-begin // PAGE_BYTES) * PAGE_BYTES) if direct else begin
    last = max(first, end // PAGE_BYTES * PAGE_BYTES) if direct else end
    if begin < first:
        yield _ParamBlock(begin, first, False)
    while first < last:
        until = min(last, (first // piece_bytes + 1) * piece_bytes)
        yield _ParamBlock(first, until, direct)
        first = until
    if last < end:
        yield _ParamBlock(last, end, False)


class Transfers:
    """What the files of one tier are read and written with."""

    def __init__(self, cache: PageCache, link: Link) -> None:
        self.cache = cache
        self.staging = Staging(link, STAGED.in_flight, STAGED.piece_bytes)
        self._io_threads = IOThreadPool(max(STAGED.in_flight, STRAIGHT.in_flight) - 1)

    def read(self, path: Path, destination: Tensor, offset: int, claim: Claim | None = None) -> None:
        """Fills ``destination`` (flat, uint8) with the bytes of a file from ``offset`` on.

        Raises:
            FileNotFoundError: if the file has gone.
            OSError: if it cannot be read, or ends too early.
        """
        self._move(path, destination, offset, claim, write=False)

    def write(self, path: Path, source: Tensor, offset: int, claim: Claim | None = None) -> None:
        """Writes ``source`` (flat, uint8) to a file, from ``offset`` on.

        Raises:
            FileNotFoundError: if the file has gone.
            OSError: if it cannot be written.
        """
        self._move(path, source, offset, claim, write=True)

    def together(self, work: Callable[[memoryview], T], parts: Sequence[memoryview]) -> list[T]:
        """Does the same work on several parts of memory at a time; the results are in the order of the parts."""
        results: dict[int, T] = {}

        def one(k: int) -> None:
            results[k] = work(parts[k])

        jobs = [self._io_threads.submit(partial(one, k)) for k in range(len(parts))]
        try:
            for job in jobs:
                job.synchronize()
        finally:
            for job in jobs:
                job.cancel()
        return [results[k] for k in range(len(parts))]

    def _move(self, path: Path, tensor: Tensor, offset: int, claim: Claim | None, *, write: bool) -> None:
        nbytes = tensor.numel()
        if not nbytes:
            return
        far = self.staging.link.is_far(tensor)
        direct = nbytes >= DIRECT_LEAST_BYTES and self.cache.direct(claim)
        staged = far or (direct and (tensor.data_ptr() - offset) % PAGE_BYTES != 0)
        cut = STAGED if staged else STRAIGHT
        pieces = [_ParamBlock(offset, offset + nbytes, False)]
        if direct or far:  # else nothing asks for more than one
            pieces = list(_pieces(offset, offset + nbytes, cut.piece_bytes, direct=direct))
        # A single piece needs no thread but the caller's: to wake another one takes longer than the pages of a bias do.
        io_threads = self._io_threads if len(pieces) > 1 else None
        flying: deque[_Flight] = deque()
        with contextlib.ExitStack() as stack:
            cached = stack.enter_context(_opened(path))
            uncached = stack.enter_context(_opened(path, os.O_DIRECT)) if direct else cached
            try:
                for piece in pieces:
                    part = tensor[piece.begin - offset : piece.end - offset]
                    buffer = None
                    if far or (staged and piece.direct):
                        while (buffer := self.staging.take(wait=not flying)) is None:
                            flying.popleft().complete()
                    flying.append(_Flight(self.staging, part, buffer, far=far, write=write))
                    flying[-1].start(io_threads, partial(_move_piece, path, cached, uncached, piece, write))
                    if len(flying) == cut.in_flight:
                        flying.popleft().complete()
                while flying:
                    flying.popleft().complete()
            finally:
                # Without this, a failed transfer goes on in the threads, while its memory is used for something else.
                for flight in flying:
                    flight.cancel()
        self.cache.moved(nbytes)


def _move_piece(path: Path, cached: int, uncached: int, piece: _ParamBlock, write: bool, memory: memoryview) -> None:
    call, begin = os.pwritev if write else os.preadv, piece.begin
    if piece.direct:
        # What a direct call leaves over is not a whole page, so this is the end of the file. The other way says so.
        moved = _moved(call, uncached, memory, begin, path)
        memory, begin = memory[moved:], begin + moved
    move_all(call, cached, memory, begin, path)


class _Flight:
    """One piece on its way, and the buffer that it travels in, if it needs one."""

    def __init__(self, staging: Staging, part: Tensor, buffer: Tensor | None, *, far: bool, write: bool) -> None:
        self._staging = staging
        self._part = part
        self._buffer = buffer
        self._far = far
        self._write = write
        self._fence: Fence | None = None
        self._job: PooledCall | None = None

    def start(self, io_threads: IOThreadPool | None, move: Callable[[memoryview], None]) -> None:
        """Begins; ``move`` moves the bytes of host memory to or from the file."""
        part, buffer = self._part, None if self._buffer is None else self._buffer[: self._part.numel()]
        if buffer is not None and self._far and self._write:
            self._fence = self._staging.link.copy(buffer, part)

        def work() -> None:
            if buffer is None:
                move(view_memory(part))
                return
            if self._fence is not None:
                # Device -> buffer. Without this, the file gets what was in the buffer before.
                self._fence()
            elif self._write:
                _copy(buffer, part)
            move(view_memory(buffer))
            if not self._far and not self._write:
                _copy(part, buffer)

        self._job = PooledCall([work], None) if io_threads is None else io_threads.submit(work)

    def complete(self) -> None:
        """Waits for the end of it."""
        try:
            assert self._job is not None
            self._job.synchronize()
            if self._buffer is not None and self._far and not self._write:
                self._fence = self._staging.link.copy(self._part, self._buffer[: self._part.numel()])
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Returns when nothing but a device copy is going on any more, finished or not."""
        if self._job is not None:
            # Without letting go of the job, which refers to this flight, its tensor stays until garbage is collected.
            job, self._job = self._job, None
            job.cancel()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            # Buffer -> device. Without this fence, the next piece overwrites it while the device still reads it.
            self._staging.release(buffer, self._fence)


def _copy(destination: Tensor, source: Tensor) -> None:
    """A plain copy, outside the interpreter lock and without the threads that torch would start for it."""
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel())


@contextlib.contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        yield fd
    finally:
        os.close(fd)
