"""The desk: memory where what rests in files is updated, a bite at a time, while bites to come are being read.

Read, compute, write, and only then read again: so the disk would rest while the processor computes, and reads would
wait for writes that are no business of theirs. The desk has three trays. While a bite is worked on in one, the next two
are read into the others, so that the disk has something to read also while the bite is written; and what is read or
written together moves together.

::

    tray 0   read 0 | compute 0 | write 0 | read 3 ...
    tray 1   read 1 ............          | compute 1 | write 1 | read 4 ...
    tray 2          | read 2 ............             | compute 2 | ...

Guarantees
    * Memory is that of three bites, however many there are, and however large the model is.
    * :meth:`Desk.lay` returns a tray that holds everything that was asked for. What was read ahead for somebody who
      did not come is thrown away. Nobody reads into a tray before what was written from it is in its file.
    * When :meth:`Desk.write` raises, nothing of it is going on any more, and what is not known to be written is left in
      the list.

Assumes
    * What is read ahead is not written by anybody else before it is used: it belongs to an update that is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial

from torch import Tensor

from offload.optim.moves import Copy, Read, Write, in_one_call, neighbours, span_bytes, write_together
from offload.tier.buffer import PAGE_BYTES, host_buffer
from offload.tier.crew import Crew, Job

__all__ = ["AHEAD", "Desk", "Tray"]

#: Transfers at a time: what a parameter of Adam needs besides its weights is three.
AT_A_TIME = 3

#: Bites that are read while one is worked on. With one, the disk rested for a third of the time in which it was waited
#: for; with three it rests no less than with two.
AHEAD = 2


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


class Desk:
    """A tray to work on, and others that are being filled. Bites come one after the other, on one lane."""

    def __init__(self) -> None:
        self._now = Tray()
        self._idle = [Tray() for _ in range(AHEAD)]
        self._ahead: deque[Tray] = deque()
        self._crew = Crew(AT_A_TIME)

    @property
    def has_room(self) -> bool:
        """Whether one more bite can be read ahead."""
        return bool(self._idle)

    def expects(self, bite: Hashable) -> bool:
        """Whether a bite is being read ahead."""
        return any(tray.bite == bite for tray in self._ahead)

    def lay(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> Tray:
        """The tray with all of ``reads``, and room for so many bytes besides.

        Raises:
            OSError: if they cannot be read; also where they were being read ahead.
        """
        if not self._ahead or self._ahead[0].bite != bite:
            while self._ahead:
                self._put_away(self._ahead.pop())
            self.look_ahead(bite, reads, room_bytes)
        tray = self._ahead.popleft()
        try:
            tray.arrive()
        except BaseException:
            self._put_away(tray)
            raise
        # Without this, a bite that failed in the middle of its arithmetic would be taken for one that was just read.
        self._put_away(self._now)
        self._now = tray
        return tray

    def look_ahead(self, bite: Hashable, reads: Sequence[Read], room_bytes: int) -> None:
        """Begins to read what a later :meth:`lay` will ask for, in the order of these calls. There must be room."""
        tray = self._idle.pop()
        self._ahead.append(tray)
        tray.lay(bite, reads, room_bytes, self._crew)

    def _put_away(self, tray: Tray) -> None:
        tray.clear()
        self._idle.append(tray)

    def write(self, writes: list[Write | Copy]) -> None:
        """Writes all, and takes them out of the list.

        Raises:
            OSError: if one could not be written. It is still in the list, as may be others.
        """
        jobs: list[tuple[Sequence[Write | Copy], Job]] = [
            (group, self._crew.give(partial(write_together, group)))
            for group in in_one_call(write for write in writes if isinstance(write, Write))
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
