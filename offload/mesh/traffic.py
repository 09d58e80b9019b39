"""Counts from shapes what one rank stores and what it receives from the others in a step: no process is started.

The same numbers are measured by :class:`~offload.telemetry.statistics.Statistics`; ``docs/distributed.md`` has the
formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.mesh.parts import Part, offsets_of
from offload.planning.partition import aligned
from offload.planning.plan import BACKWARD_CELLS, Kind, Plan

__all__ = ["MESSAGE_BYTES", "SentBytes", "Traffic", "reduced_bytes", "sent_bytes", "traffic_of", "widened"]

#: Of one message by which ranks agree: a digest and a number.
MESSAGE_BYTES = 32 + 8


def reduced_bytes(trainable: Sequence[Part]) -> int:
    """Bytes that a rank sends to each other one for the gradients of these parameters, with a flag for each."""
    return offsets_of(trainable)[1] + aligned(len(trainable))


def widened(parts: Iterable[Part]) -> list[Part]:
    """The parts in the type in which their gradients are added."""
    return [replace(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]


@dataclass(frozen=True)
class SentBytes:
    """Bytes of one shard that a rank sends to each other one."""

    #: For a load; also what the rank with the most rows stores.
    gathered: int
    #: Of gradients, in each row of a mesh; and between its rows.
    reduced: int
    replicated: int


def sent_bytes(parts: Sequence[Part], trainable: Sequence[bool]) -> SentBytes:
    """Of a shard with these ``parts``, each of which takes a gradient or not."""
    reduced = [part for part, takes in zip(parts, trainable, strict=True) if takes]
    if not reduced:
        return SentBytes(offsets_of(parts)[1], 0, 0)
    return SentBytes(offsets_of(parts)[1], reduced_bytes(reduced), reduced_bytes(widened(reduced)))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank receives from all others, as :class:`~offload.telemetry.statistics.Statistics` names them."""

    bytes_gathered: int
    bytes_reduced: int
    bytes_agreed: int


def traffic_of(plan: Plan, shards: Sequence[SentBytes], ranks: int, replicas: int = 1, *, norms: int = 0) -> Traffic:
    """Of a step whose loads and drains are those of ``plan``.

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
        sum((ranks - 1) * shard.reduced + (replicas - 1) * shard.replicated for shard in drained),
        0 if everybody == 1 else (everybody - 1) * MESSAGE_BYTES * (1 + backward + norms),
    )
