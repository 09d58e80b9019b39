"""Which rows of a parameter each rank stores, as ``torch.distributed.tensor.Shard(0)`` cuts them, and where.

Dimension 0 is cut into equal pieces of ``rows``; the last ranks may store fewer rows, or none. What ranks send to each
other has the place of every parameter at the same offset, padded to ``rows``, so that one collective moves all of them.

Parts of a shard are exchanged piece by piece, so that a collective holds a small part of it.

::

    what a rank sends    rows of p | rows of q | ...          the same offsets on every rank
    pieces                 0   |  1   |   2   |  3 ...        equal ranges of bytes, in order

Every rank has the same parts, hence the same pieces: one job of the lane is the same collectives everywhere. A piece
may begin and end inside of a row of a parameter, never inside of an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.partition import aligned
from offload.storage.contract import in_order

__all__ = [
    "Cut",
    "Part",
    "WholePart",
    "bytes_at_once",
    "cuts_between",
    "offsets_of",
    "pieces_of",
]


@dataclass(frozen=True)
class Part:
    """The cut of one parameter, of whole ``shape`` and ``stride``, over so many ``ranks``."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    ranks: int

    @classmethod
    def of(cls, name: str, parameter: Tensor, ranks: int) -> Part:
        """The cut of a parameter. Raises ValueError for one that has no rows which are contiguous in memory."""
        stride = torch.empty_like(parameter, device="meta").stride()
        part = cls(name, tuple(parameter.shape), tuple(stride), parameter.dtype, ranks)
        if not part.shape:
            raise ValueError(
                f"expected parameters with at least one dimension, got the scalar {name}: mesh= cuts parameters along "
                f"dimension 0; give it the shape (1,)"
            )
        if part.shape[0] > 1 and parameter.numel() and part.stride[0] != part.row_elements:
            raise ValueError(
                f"expected parameters whose dimension 0 is outermost in memory, got {name} with shape {part.shape} and "
                f"strides {part.stride}: mesh= cuts parameters along dimension 0; make it contiguous before wrapping"
            )
        return part

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Rows of each rank, with padding."""
        return -(-self.shape[0] // self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes that the rows of one rank take, with padding."""
        return aligned(self.rows * self.row_elements * self.dtype.itemsize)

    def span(self, rank: int) -> tuple[int, int]:
        """The first row of a rank, and the row after its last."""
        end = self.shape[0]
        return min(rank * self.rows, end), min((rank + 1) * self.rows, end)

    def stored_bytes(self, rank: int) -> int:
        """Bytes of the rows of ``rank``."""
        return self.stored_elements(rank) * self.dtype.itemsize

    def stored_elements(self, rank: int) -> int:
        """Elements of the rows of ``rank``."""
        begin, end = self.span(rank)
        return (end - begin) * self.row_elements

    def rows_of(self, flat: Tensor, rank: int) -> Tensor:
        """The rows of ``rank``, of which ``flat`` has the elements as they are in memory; no copy."""
        begin, end = self.span(rank)
        return flat.as_strided((end - begin, *self.shape[1:]), self.stride)

    def as_flat(self) -> Part:
        """The cut of its elements as they are in memory, of a tensor of any shape."""
        return Part(self.name, (math.prod(self.shape),), (1,), self.dtype, self.ranks)

    def flat(self, whole: Tensor) -> Tensor:
        """All elements of a tensor, or of rows of it, as they are in memory; a copy where its strides are others."""
        strides = zip(whole.shape, whole.stride(), self.stride, strict=True)
        if whole.numel() and any(size > 1 and here != there for size, here, there in strides):
            whole = torch.empty_strided(whole.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return in_order(whole)


class WholePart(Part):
    """What each rank stores of a parameter that all of them store whole."""

    @classmethod
    def of(cls, name: str, parameter: Tensor, ranks: int) -> WholePart:
        """The part of a parameter of any shape and layout."""
        stride = torch.empty_like(parameter, device="meta").stride()
        return cls(name, tuple(parameter.shape), tuple(stride), parameter.dtype, ranks)

    @property
    def nbytes(self) -> int:
        """Nothing is sent."""
        return 0

    def span(self, rank: int) -> tuple[int, int]:
        """All rows."""
        return 0, self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Cut:
    """Elements ``[first, last)`` of what each rank stores of one part, at a ``place`` in a range of bytes."""

    #: Which of the parts.
    number: int
    first: int
    last: int
    place: int
    #: Whether it has the last elements of the part.
    ends: bool

    def of_rank(self, part: Part, rank: int, whole: Tensor) -> Tensor:
        """The elements that ``rank`` stores, among all of the ``whole`` parameter."""
        begin, _ = part.span(rank)
        stored = part.stored_elements(rank)
        begin *= part.row_elements
        return whole[begin + min(self.first, stored) : begin + min(self.last, stored)]

    def at_rank(self, part: Part, rank: int, stored: Tensor) -> Tensor:
        """The elements among all that ``rank`` stores."""
        return stored[self.first : min(self.last, part.stored_elements(rank))]

    def sent(self, part: Part, rank: int, memory: Tensor) -> Tensor:
        """A view of the elements that ``rank`` stores, in the ``memory`` of a range of bytes that is sent."""
        stored = part.stored_elements(rank)
        count = min(self.last, stored) - min(self.first, stored)
        return memory[self.place : self.place + count * part.dtype.itemsize].view(part.dtype)


def cuts_between(parts: Sequence[Part], offsets: Sequence[int], begin: int, end: int) -> Iterator[Cut]:
    """Which elements of ``parts``, stored at these ``offsets``, are in the bytes ``[begin, end)``.

    Both are multiples of the size of any element.
    """
    for number, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        elements = 0 if isinstance(part, WholePart) else part.rows * part.row_elements
        size = part.dtype.itemsize
        first, last = max(0, begin - offset) // size, min(elements, (end - offset) // size)
        if first < last:
            yield Cut(number, first, last, offset + first * size - begin, last == elements)


def offsets_of(parts: Iterable[Part]) -> tuple[Sequence[int], int]:
    """The offset of each part in what one rank sends, and the end of the last."""
    offsets, end = [], 0
    for part in parts:
        offsets.append(end)
        end += part.nbytes
    return offsets, end


#: A collective moves so small a part of a shard times the ranks: few ranks also store much of the sums. At most a third
#: with many, whose messages are small.
_PARTS, _LEAST_PARTS = 32, 3
#: Least and most bytes of a message, as far as there are so many.
LEAST_AT_ONCE, _MOST_AT_ONCE = 1 << 16, 1 << 24


def bytes_at_once(nbytes: int, ranks: int) -> int:
    """How many of the ``nbytes`` that a rank sends to each other one are sent by one collective: whole cache lines.

    So what a collective holds is a small part of a shard.
    """
    wanted = -(-nbytes // max(_LEAST_PARTS, _PARTS // ranks))
    return aligned(min(max(wanted, LEAST_AT_ONCE), _MOST_AT_ONCE, nbytes))


def pieces_of(nbytes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The ranges of ``nbytes`` that a rank sends, in order."""
    step = bytes_at_once(nbytes, ranks)
    for begin in range(0, nbytes, max(step, 1)):
        yield begin, min(begin + step, nbytes)
