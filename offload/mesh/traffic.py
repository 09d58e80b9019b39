"""Counts from shapes what one rank stores and what it receives from the others in a step: no process is started.

The same numbers are measured by :class:`~offload.telemetry.statistics.Statistics`; ``docs/distributed.md`` has the
formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.mesh.parts import Part, WholePart, offsets_of
from offload.planning.partition import aligned
from offload.planning.plan import BACKWARD_CELLS, Kind, Plan

__all__ = [
    "MESSAGE_BYTES",
    "SentBytes",
    "Traffic",
    "bytes_at_once",
    "bytes_beside_one_process",
    "piece_bytes",
    "sent_bytes",
    "traffic_of",
    "widened",
]

#: Of one message by which ranks agree: a digest and a number.
MESSAGE_BYTES = 32 + 8

#: A collective moves so small a part of a shard times the ranks: few ranks also store much of the sums. At most a third
#: with many, whose messages are small.
_PARTS, _LEAST_PARTS = 32, 3
#: Least and most bytes of a message, as far as there are so many.
LEAST_AT_ONCE, _MOST_AT_ONCE = 1 << 16, 1 << 24


def piece_bytes(nbytes: int, ranks: int) -> int:
    """Bytes of a piece of ``nbytes`` for each rank: what each sends to every other one, twice, to add them."""
    return -(-nbytes // ranks)


def bytes_at_once(nbytes: int, ranks: int) -> int:
    """How many of the ``nbytes`` that a rank sends to each other one are sent by one collective: whole cache lines.

    So what a collective holds is a small part of a shard.
    """
    wanted = -(-nbytes // max(_LEAST_PARTS, _PARTS // ranks))
    return aligned(min(max(wanted, LEAST_AT_ONCE), _MOST_AT_ONCE, nbytes))


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
