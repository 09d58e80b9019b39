"""Exchanges the parts of a shard piece by piece, so that a collective holds a small part of it.

::

    what a rank sends    flags | rows of p | rows of q | ...          the same offsets on every rank
    pieces                 0      |  1   |   2   |  3 ...             equal ranges of bytes, in order

Every rank has the same parts, hence the same pieces: one job of the lane is the same collectives everywhere. A piece
may begin and end inside of a row of a parameter, never inside of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from offload.mesh.parts import Part, cuts_between
from offload.mesh.traffic import bytes_at_once

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks

__all__ = ["gather_parts", "pieces_of"]


def pieces_of(nbytes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """The ranges of ``nbytes`` that a rank sends, in order; one, if there are none."""
    step = bytes_at_once(nbytes, ranks)
    for begin in range(0, max(nbytes, 1), step):
        yield begin, min(begin + step, nbytes)


def gather_parts(
    parts: Sequence[Part],
    offsets: Sequence[int],
    nbytes: int,
    wholes: Sequence[Tensor | None],
    read: Callable[[Tensor, int], None],
    ranks: Ranks,
) -> None:
    """Fills ``wholes`` from the parts that the ranks store. On the lane of ranks.

    Args:
        parts: what each rank sends, at ``offsets`` in ``nbytes``.
        wholes: for each of them, all elements in the order of their memory, of any type; None: sent, and dropped.
        read: fills memory with what this rank sends from an offset on.
        ranks: that call this with the same parts.
    """
    for begin, end in pieces_of(nbytes, ranks.count):
        staging = ranks.staging(ranks.count * (end - begin)).view(ranks.count, end - begin)
        read(staging[ranks.rank], begin)
        ranks.all_gather(staging)
        for cut in cuts_between(parts, offsets, begin, end):
            part, whole = parts[cut.number], wholes[cut.number]
            if whole is not None:
                for rank in range(ranks.count):
                    cut.of_rank(part, rank, whole).copy_(cut.sent(part, rank, staging[rank]))
