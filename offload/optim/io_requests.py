"""Ranges that the on-disk optimizer reads, updates and writes; adjacent ranges of a file are transferred in one call.

A transformer block has twice as many norms and biases as matrices, and Adam transfers six tensors for each of them.
They are small: a call costs not their bytes but time of the interpreter, which the layers that compute need as well.
They are adjacent in their file, so one call can transfer all of them.

Guarantees
    * Only padding is between two ranges that are transferred together, never data of another owner.
    * Ranges that are written together are as far apart in memory as in the file, in one storage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from offload.planning.partition import aligned
from offload.storage import Block

__all__ = [
    "Copy",
    "Read",
    "UpdateBlock",
    "Write",
    "adjacent",
    "contiguous",
    "span_bytes",
    "write_together",
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

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.source.numel()

    def run(self) -> None:
        """Writes the bytes."""
        self.block.write(self.source, self.offset)


@dataclass(eq=False)
class Copy:
    """Bytes (flat, uint8) to be copied to other memory."""

    source: Tensor
    to: Tensor

    def run(self) -> None:
        """Copies the bytes."""
        self.to.copy_(self.source)


P = TypeVar("P", Read, Write)


def adjacent(places: Iterable[P]) -> Iterator[list[P]]:
    """Groups ranges of the same block with nothing but padding in between, in the block's order."""
    by_block: dict[Block, list[P]] = {}
    for place in places:
        by_block.setdefault(place.block, []).append(place)
    for members in by_block.values():
        yield from _runs(sorted(members, key=lambda place: place.offset), _is_adjacent)


def contiguous(writes: Iterable[Write]) -> Iterator[list[Write]]:
    """Groups writes that are adjacent both in their block and in memory."""
    for members in adjacent(writes):
        yield from _runs(members, _is_contiguous)


def span_bytes(group: Sequence[Read | Write]) -> int:
    """Bytes from the begin of the first to the end of the last."""
    return group[-1].offset + group[-1].nbytes - group[0].offset


def write_together(group: Sequence[Write]) -> None:
    """Writes a group of :func:`contiguous`, with the padding in between, which is never read."""
    first = group[0]
    first.block.write(first.source.as_strided((span_bytes(group),), (1,)), first.offset)


def _runs(members: Iterable[P], belong: Callable[[P, P], bool]) -> Iterator[list[P]]:
    """Groups consecutive members: a new group begins where two neighbours do not ``belong`` together."""
    run: list[P] = []
    for member in members:
        if run and not belong(run[-1], member):
            yield run
            run = []
        run.append(member)
    if run:
        yield run


def _is_adjacent(first: Read | Write, second: Read | Write) -> bool:
    return second.offset == aligned(first.offset + first.nbytes)


def _is_contiguous(first: Write, second: Write) -> bool:
    """Whether two sources share a storage, and are as far apart there as in the block."""
    a, b = first.source, second.source
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return b.data_ptr() - a.data_ptr() == second.offset - first.offset


@dataclass(frozen=True)
class UpdateBlock:
    """Elements ``[begin, end)`` of the only parameter of a param block; with ``end=None`` all of all its parameters."""

    begin: int = 0
    end: int | None = None

    def span(self, nbytes: int, itemsize: int) -> tuple[int, int]:
        """Offset and size of the block in bytes, within a tensor of ``nbytes``."""
        begin = self.begin * itemsize
        return begin, (nbytes if self.end is None else self.end * itemsize) - begin

    def shape(self, part: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        """``part`` (flat, uint8) as a tensor: of the whole shape, or flat if it is only a part of one."""
        flat = part.view(dtype)
        return flat.as_strided(tuple(shape), tuple(stride), flat.storage_offset()) if self.end is None else flat
