"""Counts from shapes what one rank holds to exchange parameters and gradients: no process is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.mesh.parts import Part, bytes_at_once

__all__ = [
    "MESSAGE_BYTES",
    "ExchangeBytes",
    "bytes_beside_one_process",
    "least_exchange_bytes",
    "widened",
]

#: Of one message by which ranks agree: a digest and a number.
MESSAGE_BYTES = 32 + 8


def bytes_beside_one_process(shard: int, ranks: int) -> int:
    """Most bytes that a rank holds beside what one process does, for shards of at most ``shard`` bytes.

    What a collective sends and receives, with a copy that gloo makes in a gather, and this rank's parts of the sums of
    gradients: at most a shard, unless messages of the least size take more.
    """
    part = -(-shard // ranks)
    return max(shard, 3 * ranks * bytes_at_once(part, ranks) + part)


def widened(parts: Iterable[Part]) -> list[Part]:
    """The parts in the type in which their gradients are added."""
    return [replace(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]


@dataclass(frozen=True)
class ExchangeBytes:
    """Bytes on a GPU by which one rank exchanges parameters and gradients, for plans under a limit of its memory.

    ::

        staging area           from the first load on: what one collective sends and receives
        drain of shard j       until the next one: whole gradients; this rank's part of their sums, in float32 at
                               least; and its part of the means of the shard before, which is being copied home
        end of a backward      of what each rank stores whole: all sums, and their means of 16 bits

    On the CPU all of this is in host memory, where steps are measured before their plan is chosen.
    """

    #: From the first load on.
    staging: int
    #: Shard -> whole gradients, in the types of their homes.
    gradients: Sequence[int]
    #: Shard -> held from its drain to the next one.
    draining: Sequence[int]
    #: At the end of a backward, beside the gradients of what each rank stores whole.
    outside: int


def least_exchange_bytes(shard: int, ranks: int, *, narrow: bool) -> int:
    """Bytes that a rank needs beside slots and whole gradients, for shards of at most ``shard`` bytes at home.

    ``narrow``: some have types of 16 bits, whose sums take twice as many.
    """
    part = -(-shard // ranks)
    return 2 * ranks * bytes_at_once(part, ranks) + (3 if narrow else 2) * part
