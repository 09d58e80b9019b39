"""The desk: memory where what rests in files is updated, a bite at a time, while others are being read and written.

Read, compute, write, and only then read again: so the disk would rest while the processor computes, and the processor
while the disk works. The desk has several trays. While a bite is worked on in one, those before it are being written
out of theirs, and those to come are being read into the rest. What is read or written together moves together.

::

    tray 0   read 0 | compute 0 | write 0 ............. | read 4 ...
    tray 1   read 1 ...........| compute 1 | write 1 ............. | read 5 ...
    tray 2   read 2 ......................| compute 2 | write 2 ...
    tray 3              read 3 ......................| compute 3 | ...

Guarantees
    * Memory is that of :data:`TRAYS` bites, however many there are, and however large the model is.
    * :meth:`Desk.lay` returns a tray that holds everything that was asked for. What was read ahead for somebody who
      did not come is thrown away. Nobody reads into a tray before what was written from it is in its file.
    * After :meth:`Desk.settle` nothing is on its way. What could not be written is not lost: it has memory of its own,
      and whoever sent it knows that it has not arrived.

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
from offload.storage.io_thread_pool import Crew, Job

__all__ = ["TRAYS", "Desk", "Tray"]

#: Transfers at a time: what one bite of Adam reads, and what another one writes.
AT_A_TIME = 6

#: Bites that are worked on, read or written at a time.
TRAYS = 5


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
        groups = list(neighbours(reads))
        nbytes = room_bytes + sum(span_bytes(group) + PAGE_BYTES for group in groups)
        if self._memory.numel() < nbytes:
            self._memory = host_buffer(0)  # before the larger one is made
            self._memory = host_buffer(nbytes)
        self.bite = bite
        for group in groups:
            begin = group[0].offset
            whole = self.take(span_bytes(group), begin)
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


@dataclass(eq=False)
class _Leaving:
    """What is on its way from a tray to where it rests."""

    #: None if it comes from elsewhere.
    tray: Tray | None
    moves: Sequence[Write | Copy]
    arrived: Callable[[Sequence[Write | Copy]], None]
    jobs: list[tuple[Sequence[Write | Copy], Job]] = field(default_factory=list)

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
                # Writer -> update lane. Without this, the tray is filled anew while the file still takes from it.
                job.finish()
                done += group
        finally:
            for _, job in self.jobs:
                job.abandon()
            self.jobs.clear()
            for move in self.moves:
                if move not in done:
                    move.source = move.source.clone()  # the tray and the slot are about to be used again
            self.arrived(done)


class Desk:
    """A tray to work on, and others that are being filled or emptied. Bites come one after the other, on one lane."""

    def __init__(self) -> None:
        self._now: Tray | None = None
        self._idle = [Tray() for _ in range(TRAYS)]
        self._ahead: deque[Tray] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._crew = Crew(AT_A_TIME)

    def make_room(self) -> bool:
        """Takes trays back whose writes have arrived; says whether one more bite can be read ahead."""
        while self._leaving and self._leaving[0].is_there:
            self._end_oldest()
        return bool(self._idle)

    def expects(self, bite: Hashable) -> bool:
        """Whether a bite is being read ahead."""
        return any(tray.bite == bite for tray in self._ahead)

    def lay(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> Tray:
        """The tray with all of ``reads``, and room for so many bytes besides.

        Raises:
            OSError: if they cannot be read, also where they were being read ahead; or if something that was sent
                before, whose tray is needed, cannot be written.
        """
        # Without this, a bite that failed in the middle of its arithmetic would be taken for one that was just read.
        self._put_away(self._now)
        self._now = None
        if not self._ahead or self._ahead[0].bite != bite:
            while self._ahead:
                self._put_away(self._ahead.pop())
            while not self._idle:
                self._end_oldest()
            self.look_ahead(bite, reads, room_bytes)
        tray = self._ahead.popleft()
        try:
            tray.arrive()
        except BaseException:
            self._put_away(tray)
            raise
        self._now = tray
        return tray

    def look_ahead(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> None:
        """Begins to read what a later :meth:`lay` will ask for, in the order of these calls. There must be room."""
        tray = self._idle.pop()
        self._ahead.append(tray)
        tray.lay(bite, reads, room_bytes, self._crew)

    def send(self, moves: Sequence[Write | Copy], arrived: Callable[[Sequence[Write | Copy]], None]) -> None:
        """Begins to write what was computed, and leaves the tray. ``arrived`` is called on this lane, with what has."""
        leaving = _Leaving(self._now, [*moves], arrived)
        self._now = None
        self._leaving.append(leaving)  # at once: what no thread is given is not lost either
        groups: list[tuple[Sequence[Write | Copy], Callable[[], None]]] = [
            (group, partial(write_together, group))
            for group in in_one_call(move for move in moves if isinstance(move, Write))
        ]
        groups += [([move], move.go) for move in moves if isinstance(move, Copy)]
        for group, write in groups:
            leaving.jobs.append((group, self._crew.give(write)))

    def settle(self) -> None:
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
            self._put_away(leaving.tray)

    def _put_away(self, tray: Tray | None) -> None:
        if tray is not None:
            tray.clear()
            self._idle.append(tray)
