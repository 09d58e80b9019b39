"""Adds gradients over the rows of a mesh of two dimensions, each of which stores the whole model.

::

    sums of replica 0   piece 0 | piece 1 | ...        all_to_all: piece r of every replica arrives at replica r
    sums of replica 1   piece 0 | piece 1 | ...        which adds them in the order of replicas
                                                       all_gather: every replica has all pieces

Each replica receives twice an R-th of what one holds from each of the R - 1 others, however many there are; gathering
whole sums would take R / 2 times as much. The order of the sum is fixed and each piece is added once, so all replicas
have the same bits. Both collectives move a small part of all pieces at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.mesh.parts import Part, cuts_between, offsets_of
from offload.mesh.pieces import pieces_of
from offload.mesh.traffic import piece_bytes, widened
from offload.planning.partition import aligned

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks

__all__ = ["add_over_replicas"]


def add_over_replicas(totals: list[Tensor | None], parts: Sequence[Part], ranks: Ranks) -> None:
    """Adds the ``totals`` of all replicas: flat sums over ranks in float32 at least, each None where there is none.

    Afterwards None where no replica has one. On the lane of ranks.
    """
    wide = widened(parts)
    offsets, nbytes = offsets_of(wide)
    count, piece = ranks.replicas, piece_bytes(nbytes, ranks.replicas)
    for begin, end in pieces_of(piece, count):
        flags = 0 if begin else aligned(len(wide))
        size = end - begin
        sent, received = ranks.staging(2 * count * (flags + size)).view(2, count, flags + size)
        if flags:
            for n, total in enumerate(totals):
                sent[:, n] = total is not None
        #: What this part of each replica's piece has of the sums.
        cuts = [list(cuts_between(wide, offsets, k * piece + begin, k * piece + end, flags)) for k in range(count)]
        for cuts_of_one, row in zip(cuts, sent, strict=True):
            for cut in cuts_of_one:
                here, total = cut.sent(wide[cut.number], ranks.rank, row), totals[cut.number]
                here.zero_() if total is None else here.copy_(cut.at_rank(wide[cut.number], ranks.rank, total))
        ranks.all_to_all_replicas(received, sent)
        if flags:
            somewhere = received[:, : len(wide)].any(dim=0).tolist()
            for n, (part, there) in enumerate(zip(wide, somewhere, strict=True)):
                if there and totals[n] is None:
                    totals[n] = torch.zeros(part.stored_elements(ranks.rank), dtype=part.dtype, device=received.device)
        for cut in cuts[ranks.replica]:
            # What this replica adds, in the order of replicas.
            here = cut.sent(wide[cut.number], ranks.rank, received[0])
            for row in received[1:]:
                here += cut.sent(wide[cut.number], ranks.rank, row)
        rows = sent.view(-1)[: count * size].view(count, size)  # what was sent has arrived
        rows[ranks.replica].copy_(received[0, flags:])
        ranks.all_gather_replicas(rows)
        for cuts_of_one, row in zip(cuts, rows, strict=True):
            for cut in cuts_of_one:
                total = totals[cut.number]
                if total is not None:
                    place = replace(cut, place=cut.place - flags)
                    cut.at_rank(wide[cut.number], ranks.rank, total).copy_(
                        place.sent(wide[cut.number], ranks.rank, row)
                    )
