"""What moves between the I/O buffers of an optimizer and where it rests; what lies side by side moves in one call.

A transformer block has twice as many norms and biases as matrices, and Adam moves six tensors for each of them.
They are small: what a call costs is not their bytes but the interpreter, which the layers that compute need as well.
In a file they lie one after the other, so one call can take them all.

Guarantees
    * Only padding ever lies between two that move together, never what is somebody else's.
    * What is written together is as far apart in memory as in the file, in memory of one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from offload.planning.partition import aligned
from offload.storage import Block

__all__ = ["Copy", "Read", "Write", "in_one_call", "neighbours", "span_bytes", "write_together"]


@dataclass(frozen=True, eq=False)
class Read:
    """Bytes of a block from ``offset`` on; ``name`` is what they are called on the I/O buffer."""

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


def neighbours(places: Iterable[P]) -> Iterator[list[P]]:
    """Groups of what lies side by side in a block, in the block's order, with nothing but padding in between."""
    by_block: dict[Block, list[P]] = {}
    for place in places:
        by_block.setdefault(place.block, []).append(place)
    for members in by_block.values():
        yield from _runs(sorted(members, key=lambda place: place.offset), _adjoin)


def in_one_call(writes: Iterable[Write]) -> Iterator[list[Write]]:
    """Groups of what lies side by side in a block, and just so in memory."""
    for members in neighbours(writes):
        yield from _runs(members, _as_far_apart)


def span_bytes(group: Sequence[_Place]) -> int:
    """From the begin of the first to the end of the last."""
    return group[-1].offset + group[-1].nbytes - group[0].offset


def write_together(group: Sequence[Write]) -> None:
    """Writes a group of :func:`in_one_call`, and the padding in between, which nobody reads."""
    first = group[0]
    first.block.write(first.source.as_strided((span_bytes(group),), (1,)), first.offset)


def _runs(members: Iterable[P], belong: Callable[[P, P], bool]) -> Iterator[list[P]]:
    """Cuts between any two that do not ``belong`` together."""
    run: list[P] = []
    for member in members:
        if run and not belong(run[-1], member):
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def _adjoin(first: _Place, second: _Place) -> bool:
    return second.offset == aligned(first.offset + first.nbytes)


def _as_far_apart(first: Write, second: Write) -> bool:
    """Whether two sources belong to the same memory, and are as far apart there as in the block."""
    a, b = first.source, second.source
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return b.data_ptr() - a.data_ptr() == second.offset - first.offset
