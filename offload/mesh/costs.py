"""Predicts what the actions of a plan cost one of N ranks, from what they cost one process and the rates of a link.

With :func:`offload.planning.simulate.simulate` this is the time of a step that no process has run, and with
:func:`offload.mesh.traffic.traffic_of` its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.mesh.traffic import SentBytes, bytes_at_once
from offload.planning.plan import Action, Kind, Plan
from offload.planning.simulate import Costs

__all__ = ["Link", "costs_of_rank", "with_updates"]


@dataclass(frozen=True)
class Link:
    """How fast one rank exchanges bytes with the others."""

    #: Received from all others together, while it sends as many; and of what a collective copies in memory.
    bytes_per_second: float
    copied_per_second: float = float("inf")
    #: Of a message from one rank to the next; those of a collective follow each other around a ring.
    latency_seconds: float = 0.0

    def seconds(self, ranks: int, sent: int) -> float:
        """Seconds of collectives in which each rank sends so many bytes to each other one; 0 for one rank."""
        if ranks == 1 or not sent:
            return 0.0
        others = (ranks - 1) * sent / self.bytes_per_second + ranks * sent / self.copied_per_second
        return others + -(-sent // bytes_at_once(sent, ranks)) * (ranks - 1) * self.latency_seconds


def costs_of_rank(
    alone: Costs, shards: Sequence[SentBytes], ranks: int, link: Link, replicas: int = 1, between: Link | None = None
) -> Costs:
    """The costs of one of ``ranks`` that store a model together, ``replicas`` times.

    Args:
        alone: of one process that stores all of it and computes on as many rows as this rank. A rank reads, stores and
            updates its part.
        shards: what each of them sends.
        ranks: in each row of the mesh; a mesh of one rank costs what ``alone`` does.
        link: between the ranks of a row.
        replicas: rows of the mesh.
        between: the link between rows; None: as within a row.
    """
    if ranks * replicas == 1:
        return alone

    def part(seconds: Sequence[float]) -> list[float]:
        return [each / ranks for each in seconds]

    reduce = [
        link.seconds(ranks, shard.reduced)
        + sum((between or link).seconds(replicas, sent) for sent in shard.to_replicas(replicas))
        for shard in shards
    ]
    return replace(
        alone,
        load=part(alone.load),
        drain=part(alone.drain),
        update=part(alone.update),
        resting_update=part(alone.resting_update),
        gather=[link.seconds(ranks, shard.gathered) for shard in shards],
        reduce=reduce,
    )


def with_updates(plan: Plan) -> Plan:
    """A step whose updates follow the last drain, as ``OffloadOptimizer.step()`` runs them with a mesh."""
    drained = [action.shard for action in plan.actions if action.kind is Kind.DRAIN]
    updates = tuple(Action(Kind.UPDATE_IN_BACKWARD, shard) for shard in drained)
    return replace(plan, actions=plan.actions + updates)
