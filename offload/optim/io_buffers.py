"""I/O buffers of the on-disk optimizer: one block is updated while others are read and written back.

To read, compute and write in turn would leave the disk idle while the processor computes, and the processor idle while
the disk transfers. So there are three buffers: one holds the block that is computed, one is being written back, and
one is being filled for the next block. More of them would make blocks of the same memory smaller, and each block costs
time of the interpreter.

Adjacent ranges of a file are transferred in one call. A transformer block has twice as many norms and biases as
matrices, and Adam transfers six tensors for each of them. They are small: a call costs not their bytes but time of the
interpreter, which the layers that compute need as well. They are adjacent in their file, so one call can transfer all.

::

    I/O buffer 0   read 0 | compute 0 | write 0 ... | read 3 ...
    I/O buffer 1   read 1 ............| compute 1 | write 1 ... | read 4 ...
    I/O buffer 2   read 2 ........................| compute 2 | write 2 ...

Guarantees
    * Memory is that of :data:`IO_BUFFERS` blocks, whatever the size of the model.
    * :meth:`IOBufferPool.prepare` returns an I/O buffer that holds everything that was requested. Unused prefetches are
      discarded. An I/O buffer is filled only after everything written from it is in its file.
    * After :meth:`IOBufferPool.wait_idle` no transfer is running. A failed write is not lost: its bytes are copied to
      memory of their own, and its owner sees that it is not :attr:`Write.written`.
    * Only padding is between two ranges that are transferred together, never data of another owner. Ranges that are
      written together are as far apart in memory as in the file, in one storage.

Assumes
    * Prefetched ranges are written by no other code before their use: they belong to an update that is pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TypeVar

from torch import Tensor

from offload.partition import aligned
from offload.storage import Block
from offload.storage.buffer import PAGE_BYTES, host_buffer
from pipe.threads import Future, Threads

__all__ = [
    "IO_BUFFERS",
    "MOST_STATES",
    "Blocks",
    "IOBuffer",
    "IOBufferPool",
    "Read",
    "UpdateBlock",
    "Write",
]


@dataclass(frozen=True, eq=False)
class Read:
    """Bytes of a block from ``offset`` on; ``name`` identifies them in the I/O buffer."""

    name: Hashable
    block: Block
    offset: int
    nbytes: int


@dataclass(eq=False)
class Write:
    """Bytes (flat, uint8) to be written to a block, from ``offset`` on."""

    source: Tensor
    block: Block
    offset: int
    #: Whether they are known to be there.
    written: bool = False

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.source.numel()

    def run(self) -> None:
        """Writes them, on the calling thread."""
        self.block.write(self.source, self.offset)
        self.written = True


#: Returns what a block reads, and bytes for its other parts.
Requests = Callable[[], tuple[Sequence[Read], int]]
#: Blocks to come, each with a key.
Blocks = Iterable[tuple[Hashable, Requests]]

P = TypeVar("P", Read, Write)


def _runs(ranges: Sequence[P], belong: Callable[[P, P], bool]) -> Iterator[list[P]]:
    """Groups ranges of each block, of which neighbours ``belong`` together."""
    blocks: dict[Block, list[P]] = {}
    for place in ranges:
        blocks.setdefault(place.block, []).append(place)
    for places in blocks.values():
        places.sort(key=attrgetter("offset"))
        begin = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or not belong(places[end - 1], places[end]):
                yield places[begin:end]
                begin = end


def _adjacent(first: Read | Write, second: Read | Write) -> bool:
    """Whether there is nothing but padding between two ranges of a block."""
    return second.offset == aligned(first.offset + first.nbytes)


def _contiguous(first: Write, second: Write) -> bool:
    """Whether two sources share a storage as well, and are as far apart there as in the block."""
    a, b = first.source, second.source
    alike = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return alike and _adjacent(first, second) and b.data_ptr() - a.data_ptr() == second.offset - first.offset


def _span_bytes(group: Sequence[Read | Write]) -> int:
    """Bytes from the begin of the first to the end of the last."""
    return group[-1].offset + group[-1].nbytes - group[0].offset


def _write_together(group: Sequence[Write]) -> None:
    """Writes what is adjacent both in its block and in memory, with the padding in between, which is never read."""
    first = group[0]
    first.block.write(first.source.as_strided((_span_bytes(group),), (1,)), first.offset)


@dataclass(frozen=True)
class UpdateBlock:
    """Elements ``[begin, end)`` of the only parameter of a param block; with ``end=None`` all of all its parameters."""

    begin: int = 0
    end: int | None = None

    def span(self, nbytes: int, itemsize: int, per: int = 1) -> tuple[int, int]:
        """Offset and size in bytes, within a tensor of ``nbytes`` with an entry for each ``per`` elements."""
        begin = -(-self.begin // per) * itemsize
        return begin, (nbytes if self.end is None else -(-self.end // per) * itemsize) - begin

    def shape(self, part: Tensor, like: Tensor) -> Tensor:
        """``part`` (flat) as a tensor of the type of ``like``: of its layout, or flat if it is only a part of one."""
        flat = part.view(like.dtype)
        return flat.as_strided(like.shape, like.stride(), flat.storage_offset()) if self.end is None else flat


#: Transfer calls at a time: those of reading one block of Adam and writing another.
CONCURRENT_CALLS = 6

#: Blocks that are computed, read or written at a time.
IO_BUFFERS = 3

#: States with the shape of the parameter that any class of ``torch.optim`` keeps at most.
MOST_STATES = 3


class IOBuffer:
    """Memory of one block. A part has the same offset within its page as in the file, so direct I/O needs no copy."""

    def __init__(self) -> None:
        self.memory = host_buffer(0)
        self._used = 0
        self._parts: dict[Hashable, Write] = {}
        #: The running reads; and writes, with what each one moves.
        self._reads: list[Future[None]] = []
        self._writes: list[tuple[list[Write], Future[None]]] = []
        #: Key of the block that it holds; None if it is idle.
        self.update_block: Hashable = None
        #: Bytes read for this block.
        self.bytes_read = 0

    def prepare(self, update_block: Hashable, reads: Sequence[Read], spare_bytes: int, io_threads: Threads) -> None:
        """Begins to read, while it is clear; ``spare_bytes`` more can be allocated with :meth:`take`."""
        groups = [*_runs(reads, _adjacent)]
        nbytes = spare_bytes + sum(_span_bytes(group) + PAGE_BYTES for group in groups)
        if self.memory.numel() < nbytes:
            self.memory = host_buffer(0)  # before the larger one is made
            self.memory = host_buffer(nbytes)
        self.update_block = update_block
        for group in groups:
            begin = group[0].offset
            whole = self.take(_span_bytes(group), begin)
            for read in group:
                part = whole[read.offset - begin : read.offset - begin + read.nbytes]
                self._parts[read.name] = Write(part, read.block, read.offset)
                self.bytes_read += read.nbytes
            self._reads.append(io_threads.offer(partial(group[0].block.read_into, whole, begin)))

    def wait(self) -> None:
        """Waits for the reads; raises their exception."""
        for job in self._reads:
            # Reader -> update lane. Without this, moments and gradients are those of the block before.
            job.run_or_wait()
        self._reads.clear()

    def write(self, writes: Sequence[Write], io_threads: Threads) -> None:
        """Begins to write; :meth:`collect` has to follow."""
        groups = _runs(writes, _contiguous)
        self._writes = [(group, io_threads.offer(partial(_write_together, group))) for group in groups]

    @property
    def written(self) -> bool:
        """Whether all of the writes are complete."""
        return all(job.returned for _, job in self._writes)

    def collect(self) -> None:
        """Returns when none of the writes is running. Raises the exception of one, whose bytes have memory of their own
        then: the I/O buffer and the slot are about to be reused."""
        errors: list[BaseException] = []
        for group, job in self._writes:
            try:
                # Writer -> update lane. Without this, the I/O buffer is filled again while it is being written.
                job.run_or_wait()
                for write in group:
                    write.written = True
            except BaseException as error:
                errors.append(error)
                for write in group:
                    write.source = write.source.clone()
        self._writes = []
        if errors:
            raise errors[0]

    def clear(self) -> None:
        """Forgets the parts. Returns when nothing is read into it."""
        for job in self._reads:
            # Without this, a discarded prefetch overwrites the next block.
            job.cancel()
        self._reads.clear()
        self._parts.clear()
        self._used = self.bytes_read = 0
        self.update_block = None

    def part(self, name: Hashable) -> Write:
        """The bytes of the read of that name, to be written back where they are from."""
        return self._parts[name]

    def read(self, block: Block, offset: int, nbytes: int) -> Tensor:
        """Reads one more range, on the calling thread."""
        part = self.take(nbytes, offset)
        block.read_into(part, offset)
        self.bytes_read += nbytes
        return part

    def take(self, nbytes: int, offset: int = 0) -> Tensor:
        """Allocates memory for ``nbytes`` at ``offset`` of a file; flat, uint8."""
        begin = self._used + (offset - self._used) % PAGE_BYTES
        self._used = begin + nbytes
        return self.memory[begin : self._used]


class IOBufferPool:
    """The current I/O buffer, and others that are being filled or written back. Used by one lane, block after block."""

    def __init__(self) -> None:
        self._idle = [IOBuffer() for _ in range(IO_BUFFERS)]
        self._current: IOBuffer | None = None
        self._prefetched: deque[IOBuffer] = deque()
        self._writing: deque[IOBuffer] = deque()
        self._io_threads = Threads(CONCURRENT_CALLS, "offload-io")
        self._largest = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all I/O buffers when each has held the largest block so far; 0 before the first one."""
        return IO_BUFFERS * self._largest

    def free_memory(self) -> None:
        """Frees the memory of idle I/O buffers."""
        self._idle = [IOBuffer() for _ in self._idle]

    def prepare(self, update_block: Hashable, requests: Requests) -> IOBuffer:
        """The I/O buffer with all that a block needs.

        Raises OSError if they cannot be read, or an earlier block whose I/O buffer is needed cannot be written.
        """
        # Without this, a block that failed in the middle of its arithmetic would count as just read.
        self._recycle(self._current)
        self._current = None
        if not self._prefetched or self._prefetched[0].update_block != update_block:
            while self._prefetched:
                self._recycle(self._prefetched.pop())
            while not self._idle:
                self._finish_oldest()
            self._fill(update_block, requests)
        self._current = self._prefetched.popleft()
        self._current.wait()
        return self._current

    def prefetch(self, update_blocks: Blocks) -> None:
        """Begins to read as many blocks as there are idle I/O buffers, for a later :meth:`prepare` in this order."""
        under_way = [io_buffer.update_block for io_buffer in self._prefetched]
        for update_block, requests in update_blocks:
            if update_block in under_way:
                continue
            while self._writing and self._writing[0].written:
                self._finish_oldest()
            if not self._idle:
                return
            self._fill(update_block, requests)

    def _fill(self, update_block: Hashable, requests: Requests) -> None:
        reads, spare_bytes = requests()
        self._prefetched.append(self._idle.pop())
        self._prefetched[-1].prepare(update_block, reads, spare_bytes, self._io_threads)

    def write_back(self, writes: Sequence[Write]) -> None:
        """Begins to write from the current I/O buffer."""
        io_buffer, self._current = self._current, None
        assert io_buffer is not None
        io_buffer.write(writes, self._io_threads)
        self._writing.append(io_buffer)

    def wait_idle(self) -> None:
        """Returns when no write is running.

        After an OSError the bytes of failed writes have memory of their own, and can be written again.
        """
        errors: list[BaseException] = []
        while self._writing:
            try:
                self._finish_oldest()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _finish_oldest(self) -> None:
        io_buffer = self._writing.popleft()
        try:
            io_buffer.collect()
        finally:
            self._recycle(io_buffer)

    def _recycle(self, io_buffer: IOBuffer | None) -> None:
        if io_buffer is not None:
            self._largest = max(self._largest, io_buffer.memory.numel())
            io_buffer.clear()
            self._idle.append(io_buffer)
