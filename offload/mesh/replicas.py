"""Adds gradients over the rows of a mesh of two dimensions, each of which stores the whole model.

::

    sums of replica 0   piece 0 | piece 1 | ...        all_to_all: piece r of every replica arrives at replica r
    sums of replica 1   piece 0 | piece 1 | ...        which adds them in the order of replicas
                                                       all_gather: every replica has all pieces

Each replica receives twice an R-th of what one holds from each of the R - 1 others, however many there are; gathering
whole sums would take R / 2 times as much. The order of the sum is fixed and each piece is added once, so all replicas
have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from offload.mesh.parts import Part, offsets_of
from offload.mesh.traffic import piece_bytes, widened
from offload.planning.partition import aligned
from offload.storage.buffer import host_buffer

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks

__all__ = ["add_over_replicas"]


def add_over_replicas(totals: Sequence[Tensor | None], parts: Sequence[Part], ranks: Ranks) -> list[Tensor | None]:
    """The sum over replicas of each one's ``totals``, in float32 at least; None where no replica has one.

    On the lane of ranks.
    """
    wide = widened(parts)
    offsets, end = offsets_of(wide)
    count, piece, flags = ranks.replicas, piece_bytes(end, ranks.replicas), slice(0, len(wide))
    sums = host_buffer(count * piece)
    sent, received = (host_buffer(count * (piece + aligned(len(wide)))).view(count, -1) for _ in range(2))
    for n, (total, part, offset) in enumerate(zip(totals, wide, offsets, strict=True)):
        sent[:, piece + n] = total is not None
        here = part.view(sums, offset, ranks.rank)
        here.zero_() if total is None else here.copy_(total)
    sent[:, :piece].copy_(sums.view(count, piece))
    ranks.all_to_all_replicas(received, sent)
    pieces = sums.view(count, piece)
    first = ranks.replica * piece
    for part, offset in zip(wide, offsets, strict=True):
        # What this replica adds of it. Pieces begin at multiples of the size of any element.
        cut = slice(max(0, offset - first), min(piece, offset + part.nbytes - first))
        if cut.start < cut.stop:
            total = pieces[ranks.replica, cut].view(part.dtype).copy_(received[0, cut].view(part.dtype))
            for row in received[1:]:
                total += row[cut].view(part.dtype)
    ranks.all_gather_replicas(pieces)
    somewhere = received[:, piece:][:, flags].any(dim=0).tolist()
    return [
        part.view(sums, offset, ranks.rank).clone() if there else None
        for there, part, offset in zip(somewhere, wide, offsets, strict=True)
    ]
