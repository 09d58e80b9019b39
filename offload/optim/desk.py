"""The desk: memory where what rests in files is updated, a bite at a time, while the next bite is already being read.

Read, compute, write, and only then read again: so the disk would rest while the processor computes, and reads would
wait for writes that are no business of theirs. The desk has two trays. While a bite is worked on in one, the next is
read into the other; and what is read or written together moves together. What lies side by side in a file moves in one
call: a block has more norms and biases than matrices, and each call takes the interpreter from the layers.

::

    tray 0   read 0 | compute 0 | write 0 | read 2           | compute 2 | write 2
    tray 1          | read 1              | compute 1 | ...

Guarantees
    * Memory is that of two bites, however many there are, and however large the model is.
    * :meth:`Desk.lay` returns a tray that holds everything that was asked for. What was read ahead for somebody who
      did not come is thrown away. Nobody reads into a tray before what was written from it is in its file.
    * When :meth:`Desk.write` raises, nothing of it is going on any more, and what is not known to be written is left in
      the list.

Assumes
    * What is read ahead is not written by anybody else before it is used: it belongs to an update that is decided.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from offload.partition import aligned
from offload.tier import Block
from offload.tier.buffer import PAGE_BYTES, host_buffer
from offload.tier.crew import Crew, Job

__all__ = ["Copy", "Desk", "Read", "Tray", "Write"]

#: Transfers at a time: what a parameter of Adam needs besides its weights is three.
AT_A_TIME = 3


@dataclass(frozen=True, eq=False)
class Read:
    """Bytes of a block from ``offset`` on; ``name`` is what they are called on the tray."""

    name: Hashable
    block: Block
    offset: int
    nbytes: int


@dataclass(eq=False)
class Write:
    """Bytes (flat, uint8) that are ready to go where they rest: to a block, from ``offset`` on."""

    source: Tensor
    block: Block
    offset: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.source.numel()

    def go(self) -> None:
        """Writes them."""
        self.block.write(self.source, self.offset)


@dataclass(eq=False)
class Copy:
    """Bytes (flat, uint8) that are ready to go where they rest: to other memory."""

    source: Tensor
    to: Tensor

    def go(self) -> None:
        """Copies them."""
        self.to.copy_(self.source)


class _Place(Protocol):
    """Bytes of a block."""

    @property
    def block(self) -> Block: ...

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=_Place)


def _neighbours(places: Iterable[P]) -> Iterator[list[P]]:
    """Groups of what lies side by side in a block, in the block's order, with nothing but padding in between."""
    by_block: dict[Block, list[P]] = {}
    for place in places:
        by_block.setdefault(place.block, []).append(place)
    for members in by_block.values():
        members.sort(key=lambda place: place.offset)
        group: list[P] = []
        for place in members:
            if group and place.offset != aligned(group[-1].offset + group[-1].nbytes):
                yield group
                group = []
            group.append(place)
        yield group


def _span(group: Sequence[_Place]) -> int:
    """Bytes from the begin of the first to the end of the last."""
    return group[-1].offset + group[-1].nbytes - group[0].offset


def _in_one_call(writes: Iterable[Write]) -> Iterator[list[Write]]:
    """Groups of what lies side by side in the block, and just so in memory."""
    for neighbours in _neighbours(writes):
        group: list[Write] = []
        for write in neighbours:
            if group and not _as_far_apart(group[-1], write):
                yield group
                group = []
            group.append(write)
        yield group


def _as_far_apart(first: Write, second: Write) -> bool:
    """Whether two sources belong to the same memory, and are as far apart there as in the block."""
    a, b = first.source, second.source
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return b.data_ptr() - a.data_ptr() == second.offset - first.offset


def _write_group(group: Sequence[Write]) -> None:
    first = group[0]
    # The padding in between goes with the rest; nobody reads it.
    first.block.write(first.source.as_strided((_span(group),), (1,)), first.offset)


class Tray:
    """Memory for one bite.

    A part lies within its page as the bytes lie within theirs in the file, so that a disk can move them with no copy.
    """

    def __init__(self) -> None:
        self._memory = host_buffer(0)
        self._used = 0
        self._parts: dict[Hashable, Tensor] = {}
        self._jobs: list[Job] = []
        #: For whom it is laid; None if for nobody.
        self.bite: Hashable = None
        #: Bytes that were read since it was laid.
        self.bytes_read = 0

    def lay(self, bite: Hashable, reads: Sequence[Read], room_bytes: int, crew: Crew) -> None:
        """Begins to read. Whatever the tray held is gone; there is room for so many bytes besides."""
        self.clear()
        groups = list(_neighbours(reads))
        nbytes = room_bytes + sum(_span(group) + PAGE_BYTES for group in groups)
        if self._memory.numel() < nbytes:
            self._memory = host_buffer(0)  # before the larger one is made
            self._memory = host_buffer(nbytes)
        self.bite = bite
        for group in groups:
            begin = group[0].offset
            whole = self.take(_span(group), begin)
            for read in group:
                self._parts[read.name] = whole[read.offset - begin : read.offset - begin + read.nbytes]
                self.bytes_read += read.nbytes
            self._jobs.append(crew.give(partial(group[0].block.read_into, whole, begin)))

    def arrive(self) -> None:
        """Waits for what is being read; raises what reading raised."""
        try:
            for job in self._jobs:
                # Reader -> update lane. Without this, moments and gradients are what the bite before left on the tray.
                job.finish()
        except BaseException:
            self.clear()
            raise
        self._jobs.clear()

    def clear(self) -> None:
        """Returns when nobody reads into the tray any more; its parts are forgotten."""
        for job in self._jobs:
            # Without this, what was read ahead for nobody arrives on top of the next bite.
            job.abandon()
        self._jobs.clear()
        self._parts.clear()
        self._used = self.bytes_read = 0
        self.bite = None

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


class Desk:
    """Two trays. Bites come one after the other, on one lane."""

    def __init__(self) -> None:
        self._now, self._next = Tray(), Tray()
        self._crew = Crew(AT_A_TIME)

    def lay(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> Tray:
        """The tray with all of ``reads``, and room for so many bytes besides.

        Raises:
            OSError: if they cannot be read; also where they were being read ahead.
        """
        self.look_ahead(bite, reads, room_bytes)
        self._next.arrive()
        self._now, self._next = self._next, self._now
        # Without this, a bite that failed in the middle of its arithmetic would be taken for one that was just read.
        self._next.clear()
        return self._now

    def look_ahead(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> None:
        """Begins to read what the next :meth:`lay` will ask for. To be called when the last bite but one is written."""
        if self._next.bite != bite:
            self._next.lay(bite, reads, room_bytes, self._crew)

    def write(self, writes: list[Write | Copy]) -> None:
        """Writes all, and takes them out of the list.

        Raises:
            OSError: if one could not be written. It is still in the list, as may be others.
        """
        jobs: list[tuple[Sequence[Write | Copy], Job]] = [
            (group, self._crew.give(partial(_write_group, group)))
            for group in _in_one_call(write for write in writes if isinstance(write, Write))
        ]
        jobs += [([copy], self._crew.give(copy.go)) for copy in writes if isinstance(copy, Copy)]
        done: list[Write | Copy] = []
        try:
            for group, job in jobs:
                # Writer -> update lane. Without this, the tray is filled anew while the file still takes from it.
                job.finish()
                done += group
        finally:
            for _, job in jobs:
                job.abandon()
            writes[:] = [write for write in writes if write not in done]
