"""Counts what ranks hold on a GPU to exchange parameters and gradients, for plans under a limit of its memory.

::

    staging area            from the first load on: what one collective sends and receives
    drain of shard j        until the next one: whole gradients; this rank's part of their sums, in float32 at least;
                            and its part of the means of the shard before, which is being copied home
    end of a backward       of what each rank stores whole: all sums, and their means of 16 bits

On the CPU all of this is in host memory, where steps are measured before their plan is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.traffic import LEAST_AT_ONCE, bytes_at_once, widened

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks
    from offload.mesh.shard import MeshShard

__all__ = ["ExchangeBytes", "exchange_bytes", "least_exchange_bytes"]


@dataclass(frozen=True)
class ExchangeBytes:
    """Bytes on the compute device of one rank."""

    #: From the first load on.
    staging: int
    #: Shard -> whole gradients, in the types of their homes.
    gradients: Sequence[int]
    #: Shard -> held from its drain to the next one.
    draining: Sequence[int]
    #: At the end of a backward, beside the gradients of what each rank stores whole.
    outside: int


def exchange_bytes(shards: Sequence[MeshShard], replicated: Sequence[Part], ranks: Ranks) -> ExchangeBytes:
    """The bytes of these ``shards``; ``replicated``: the cuts of what each rank stores whole, and trains."""
    trained = [
        [p for p, s in zip(shard.parts, shard.slices, strict=True) if s.parameter.requires_grad] for shard in shards
    ]
    reduced = [[part for part in parts if not isinstance(part, WholePart)] for parts in trained]
    staging = [_gathering(shard.parts, ranks) for shard in shards] + [_reducing(parts, ranks) for parts in reduced]
    sums = [_whole(part) for part in widened(replicated)]
    staging.append(min(sum(each for each in sums if each <= LEAST_AT_ONCE // 2), LEAST_AT_ONCE))
    draining, before = [0] * len(shards), 0
    for j in range(len(shards) - 1, -1, -1):
        if reduced[j]:
            draining[j] = sum(map(_whole, reduced[j])) + _stored(widened(reduced[j]), ranks) + before
            before = _stored(reduced[j], ranks)
    return ExchangeBytes(
        staging=max(staging),
        gradients=[sum(map(_whole, parts)) for parts in trained],
        draining=draining,
        outside=sum(sums) + sum(_whole(part) for part in replicated if part not in widened([part])),
    )


def least_exchange_bytes(shard: int, ranks: int, *, narrow: bool) -> int:
    """Bytes that a rank needs beside slots and whole gradients, for shards of at most ``shard`` bytes at home.

    ``narrow``: some have types of 16 bits, whose sums take twice as many.
    """
    part = -(-shard // ranks)
    staging = (2 * ranks if narrow else ranks + 1) * bytes_at_once(part, ranks)
    return staging + (3 if narrow else 2) * part


def _whole(part: Part) -> int:
    return torch.Size(part.shape).numel() * part.dtype.itemsize


def _stored(parts: Iterable[Part], ranks: Ranks) -> int:
    return sum(part.stored_bytes(ranks.rank) for part in parts)


def _gathering(parts: Sequence[Part], ranks: Ranks) -> int:
    """Bytes of the staging area for a gather."""
    nbytes = offsets_of(parts)[1]
    return ranks.count * bytes_at_once(nbytes, ranks.count) if nbytes else 0


def _reducing(parts: Sequence[Part], ranks: Ranks) -> int:
    """The same for a reduction."""
    most = 0
    for positions in ranks.transport.together(parts):
        some = [parts[k] for k in positions]
        # What the collective adds arrives as one row.
        rows = 1 if ranks.transport.adds_in(some[0].dtype) else ranks.count
        most = max(most, (ranks.count + rows) * bytes_at_once(offsets_of(some)[1], ranks.count))
    return most
