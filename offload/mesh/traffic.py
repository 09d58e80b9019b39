"""Counts from shapes what one rank stores and what it receives from the others in a step: no process is started.

The same numbers are measured by :class:`~offload.telemetry.statistics.Statistics`; ``docs/distributed.md`` has the
formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.mesh.parts import Part, WholePart, bytes_at_once, offsets_of
from offload.planning.partition import aligned
from offload.planning.plan import BACKWARD_CELLS, Kind, Plan

__all__ = [
    "MESSAGE_BYTES",
    "ExchangeBytes",
    "SentBytes",
    "Traffic",
    "bytes_beside_one_process",
    "least_exchange_bytes",
    "piece_bytes",
    "sent_bytes",
    "traffic_of",
    "widened",
]

#: Of one message by which ranks agree: a digest and a number.
MESSAGE_BYTES = 32 + 8


def piece_bytes(nbytes: int, ranks: int) -> int:
    """Bytes of a piece of ``nbytes`` for each rank: what each sends to every other one, twice, to add them."""
    return -(-nbytes // ranks)


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
class SentBytes:
    """Bytes of one shard that a rank sends to each other one."""

    #: For a load; also what the rank with the most rows stores.
    gathered: int
    #: Of gradients, with the flags that say which there are.
    reduced: int
    #: Of the sums of these, and of their flags.
    sums: int
    flags: int

    def to_replicas(self, replicas: int) -> tuple[int, int]:
        """To each replica, in the two passes of the collective that adds the sums."""
        piece = piece_bytes(self.sums, replicas)
        return piece + self.flags, piece


def sent_bytes(parts: Sequence[Part], trainable: Sequence[bool]) -> SentBytes:
    """The bytes sent for a shard with these ``parts``, each of which takes a gradient or not."""
    both = zip(parts, trainable, strict=True)
    reduced = [part for part, takes in both if takes and not isinstance(part, WholePart)]
    flags = aligned(len(reduced)) if reduced else 0  # without gradients nothing is reduced
    return SentBytes(offsets_of(parts)[1], offsets_of(reduced)[1] + flags, offsets_of(widened(reduced))[1], flags)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank receives from all others, as :class:`~offload.telemetry.statistics.Statistics` names them."""

    bytes_gathered: int
    bytes_reduced: int
    bytes_agreed: int


def traffic_of(plan: Plan, shards: Sequence[SentBytes], ranks: int, replicas: int = 1, *, norms: int = 0) -> Traffic:
    """The bytes received in a step whose loads and drains are those of ``plan``.

    Args:
        plan: of one forward, with a backward or without.
        shards: what each one sends.
        ranks: that store the model together.
        replicas: how often it is stored.
        norms: of all gradients, one for each step of an optimizer with ``max_norm``.
    """
    drained = [shards[action.shard] for action in plan.actions if action.kind is Kind.DRAIN]
    backward = any(action.kind in BACKWARD_CELLS for action in plan.actions)
    everybody = ranks * replicas
    return Traffic(
        (ranks - 1) * sum(shards[j].gathered for j in plan.loads),
        sum((ranks - 1) * shard.reduced + (replicas - 1) * sum(shard.to_replicas(replicas)) for shard in drained),
        0 if everybody == 1 else (everybody - 1) * MESSAGE_BYTES * (1 + backward + norms),
    )


# --- Counts what ranks hold on a GPU to exchange parameters and gradients, for plans under a limit of its memory -----
#
# ::
#
#     staging area            from the first load on: what one collective sends and receives
#     drain of shard j        until the next one: whole gradients; this rank's part of their sums, in float32 at least;
#                             and its part of the means of the shard before, which is being copied home
#     end of a backward       of what each rank stores whole: all sums, and their means of 16 bits
#
# On the CPU all of this is in host memory, where steps are measured before their plan is chosen.


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


def least_exchange_bytes(shard: int, ranks: int, *, narrow: bool) -> int:
    """Bytes that a rank needs beside slots and whole gradients, for shards of at most ``shard`` bytes at home.

    ``narrow``: some have types of 16 bits, whose sums take twice as many.
    """
    part = -(-shard // ranks)
    staging = (2 * ranks if narrow else ranks + 1) * bytes_at_once(part, ranks)
    return staging + (3 if narrow else 2) * part
