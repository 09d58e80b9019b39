"""I/O buffers of the on-disk optimizer: one block is updated while others are read and written back.

Read, compute, write, and only then read again: so the disk would rest while the processor computes, and the processor
while the disk works. The I/O buffers have several I/O buffers. While a block is worked on in one, those before it are
being written out of theirs, and those to come are being read into the rest. What is read or written together moves
together.

::

    I/O buffer 0   read 0 | compute 0 | write 0 ............. | read 4 ...
    I/O buffer 1   read 1 ...........| compute 1 | write 1 ............. | read 5 ...
    I/O buffer 2   read 2 ......................| compute 2 | write 2 ...
    I/O buffer 3              read 3 ......................| compute 3 | ...

Guarantees
    * Memory is that of :data:`IO_BUFFERS` blocks, however many there are, and however large the model is.
    * :meth:`IOBufferPool.prepare` returns an I/O buffer that holds everything that was asked for. What was read ahead
      for somebody who did not come is thrown away. Nobody reads into an I/O buffer before what was written from it is
      in its file.
    * After :meth:`IOBufferPool.wait_idle` nothing is on its way. What could not be written is not lost: it has memory
      of its own, and whoever sent it knows that it has not arrived.

Assumes
    * What is read ahead is not written by anybody else before it is used: it belongs to an update that is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from offload.optim.io_requests import Copy, Read, Write, in_one_call, neighbours, span_bytes, write_together
from offload.storage.buffer import PAGE_BYTES, host_buffer
from offload.storage.io_thread_pool import IOThreadPool, PooledCall

__all__ = ["IO_BUFFERS", "IOBuffer", "IOBufferPool", "buffer_pool_bytes"]

#: Transfers at a time: what one block of Adam reads, and what another one writes.
AT_A_TIME = 6

#: Bites that are worked on, read or written at a time.
IO_BUFFERS = 5

#: What an I/O buffer has room for, in sizes of its block: weights, gradient as it is and clipped, and up to three
#: states.
PARTS = 6


def buffer_pool_bytes(update_block_bytes: int) -> int:
    """The most that an I/O buffers takes whose blocks have so many bytes of weights."""
    return IO_BUFFERS * PARTS * (update_block_bytes + PAGE_BYTES)


class IOBuffer:
    """Memory for one block.

    A part lies within its page as the bytes lie within theirs in the file, so that a disk can move them with no copy.
    """

    def __init__(self) -> None:
        self._memory = host_buffer(0)
        self._used = 0
        self._parts: dict[Hashable, Tensor] = {}
        self._jobs: list[PooledCall] = []
        #: For whom it is laid; None if for nobody.
        self.update_block: Hashable = None
        #: Bytes that were read since it was laid.
        self.bytes_read = 0

    def prepare(
        self, update_block: Hashable, reads: Sequence[Read], spare_bytes: int, io_threads: IOThreadPool
    ) -> None:
        """Begins to read. Whatever the I/O buffer held is gone; there is room for so many bytes besides."""
        self.clear()
        groups = list(neighbours(reads))
        nbytes = spare_bytes + sum(span_bytes(group) + PAGE_BYTES for group in groups)
        if self._memory.numel() < nbytes:
            self._memory = host_buffer(0)  # before the larger one is made
            self._memory = host_buffer(nbytes)
        self.update_block = update_block
        for group in groups:
            begin = group[0].offset
            whole = self.take(span_bytes(group), begin)
            for read in group:
                self._parts[read.name] = whole[read.offset - begin : read.offset - begin + read.nbytes]
                self.bytes_read += read.nbytes
            self._jobs.append(io_threads.submit(partial(group[0].block.read_into, whole, begin)))

    def wait(self) -> None:
        """Waits for what is being read; raises what reading raised."""
        try:
            for job in self._jobs:
                # Reader -> update lane. Without this, moments and gradients are what the block before left on the I/O
                # buffer.
                job.synchronize()
        except BaseException:
            self.clear()
            raise
        self._jobs.clear()

    def clear(self) -> None:
        """Returns when nobody reads into the I/O buffer any more; its parts are forgotten."""
        for job in self._jobs:
            # Without this, what was read ahead for nobody arrives on top of the next block.
            job.cancel()
        self._jobs.clear()
        self._parts.clear()
        self._used = self.bytes_read = 0
        self.update_block = None

    def part(self, name: Hashable) -> Tensor:
        """What was read under a name; flat, uint8."""
        return self._parts[name]

    def read(self, read: Read) -> Tensor:
        """Reads something more, now."""
        part = self.take(read.nbytes, read.offset)
        read.block.read_into(part, read.offset)
        self.bytes_read += read.nbytes
        return part

    def take(self, nbytes: int, offset: int = 0) -> Tensor:
        """Room for the ``nbytes`` at ``offset`` of a file; flat, uint8."""
        begin = self._used + (offset - self._used) % PAGE_BYTES
        self._used = begin + nbytes
        return self._memory[begin : self._used]


@dataclass(eq=False)
class _Leaving:
    """What is on its way from an I/O buffer to where it rests."""

    #: None if it comes from elsewhere.
    io_buffer: IOBuffer | None
    moves: Sequence[Write | Copy]
    arrived: Callable[[Sequence[Write | Copy]], None]
    jobs: list[tuple[Sequence[Write | Copy], PooledCall]] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether all of it arrived."""
        given = sum(len(group) for group, _ in self.jobs)
        return given == len(self.moves) and all(job.succeeded for _, job in self.jobs)

    def end(self) -> None:
        """Returns when nothing of it is on its way any more; raises what writing raised."""
        done: list[Write | Copy] = []
        try:
            for group, job in self.jobs:
                # Writer -> update lane. Without this, the I/O buffer is filled anew while the file still takes from it.
                job.synchronize()
                done += group
        finally:
            for _, job in self.jobs:
                job.cancel()
            self.jobs.clear()
            for move in self.moves:
                if move not in done:
                    move.source = move.source.clone()  # the I/O buffer and the slot are about to be used again
            self.arrived(done)


class IOBufferPool:
    """An I/O buffer to work on, and others that are being filled or emptied. Bites come one after the other, on one
    lane."""

    def __init__(self) -> None:
        self._now: IOBuffer | None = None
        self._idle = [IOBuffer() for _ in range(IO_BUFFERS)]
        self._ahead: deque[IOBuffer] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._io_threads = IOThreadPool(AT_A_TIME)

    def make_room(self) -> bool:
        """Takes I/O buffers back whose writes have arrived; says whether one more block can be read ahead."""
        while self._leaving and self._leaving[0].is_there:
            self._end_oldest()
        return bool(self._idle)

    def expects(self, update_block: Hashable) -> bool:
        """Whether a block is being read ahead."""
        return any(io_buffer.update_block == update_block for io_buffer in self._ahead)

    def prepare(self, update_block: Hashable, reads: Sequence[Read], spare_bytes: int) -> IOBuffer:
        """The I/O buffer with all of ``reads``, and room for so many bytes besides.

        Raises:
            OSError: if they cannot be read, also where they were being read ahead; or if something that was sent
                before, whose I/O buffer is needed, cannot be written.
        """
        # Without this, a block that failed in the middle of its arithmetic would be taken for one that was just read.
        self._put_away(self._now)
        self._now = None
        if not self._ahead or self._ahead[0].update_block != update_block:
            while self._ahead:
                self._put_away(self._ahead.pop())
            while not self._idle:
                self._end_oldest()
            self.prefetch(update_block, reads, spare_bytes)
        io_buffer = self._ahead.popleft()
        try:
            io_buffer.wait()
        except BaseException:
            self._put_away(io_buffer)
            raise
        self._now = io_buffer
        return io_buffer

    def prefetch(self, update_block: Hashable, reads: Sequence[Read], spare_bytes: int) -> None:
        """Begins to read what a later :meth:`prepare` will ask for, in the order of these calls. There must be room."""
        io_buffer = self._idle.pop()
        self._ahead.append(io_buffer)
        io_buffer.prepare(update_block, reads, spare_bytes, self._io_threads)

    def send(self, moves: Sequence[Write | Copy], arrived: Callable[[Sequence[Write | Copy]], None]) -> None:
        """Begins to write what was computed, and leaves the I/O buffer. ``arrived`` is called on this lane, with what
        has."""
        leaving = _Leaving(self._now, [*moves], arrived)
        self._now = None
        self._leaving.append(leaving)  # at once: what no thread is given is not lost either
        groups: list[tuple[Sequence[Write | Copy], Callable[[], None]]] = [
            (group, partial(write_together, group))
            for group in in_one_call(move for move in moves if isinstance(move, Write))
        ]
        groups += [([move], move.go) for move in moves if isinstance(move, Copy)]
        for group, write in groups:
            leaving.jobs.append((group, self._io_threads.submit(write)))

    def wait_idle(self) -> None:
        """Returns when nothing that was sent is on its way any more.

        Raises:
            OSError: if something could not be written. What did not arrive has memory of its own from here on, and can
                be sent again.
        """
        errors: list[BaseException] = []
        while self._leaving:
            try:
                self._end_oldest()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _end_oldest(self) -> None:
        leaving = self._leaving.popleft()
        try:
            leaving.end()
        finally:
            self._put_away(leaving.io_buffer)

    def _put_away(self, io_buffer: IOBuffer | None) -> None:
        if io_buffer is not None:
            io_buffer.clear()
            self._idle.append(io_buffer)
