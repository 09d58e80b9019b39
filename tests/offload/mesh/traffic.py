"""The formula of ``docs/distributed.md``: bytes that a rank receives from the others in a step, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.traffic import MESSAGE_BYTES, piece_bytes, widened
from offload.planning.partition import aligned
from offload.planning.plan import BACKWARD_CELLS, Kind, Plan


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
