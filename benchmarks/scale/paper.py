"""Models, machines and their steps on paper: what a rank stores, what it receives, and what bounds its step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.harness.worker import Reporter
from offload.mesh.costs import Link, costs_of_rank, with_updates
from offload.mesh.parts import Part
from offload.mesh.traffic import SentBytes, Traffic, sent_bytes, traffic_of
from offload.planning.plan import Kind, Plan
from offload.planning.planner import plan_step
from offload.planning.simulate import Costs, Forecast, simulate

Shape = tuple[int, ...]
STATES = 2  # moments of AdamW
#: Multiply-adds of a parameter and a token: two operations each, forward; twice as many backward.
FORWARD_FLOPS = 2.0


@dataclass(frozen=True)
class Decoder:
    """A decoder with grouped queries and a gated perceptron; embedding and head are not tied."""

    blocks: int
    width: int
    inner: int
    key_heads: int
    head: int
    vocabulary: int

    @property
    def shards(self) -> list[list[Shape]]:
        """Shapes of the embedding, of each block, and of the norm and head."""
        queries, keys = self.width, self.key_heads * self.head
        attention: list[Shape] = [(queries, self.width), (keys, self.width), (keys, self.width), (self.width, queries)]
        perceptron: list[Shape] = [(self.inner, self.width), (self.inner, self.width), (self.width, self.inner)]
        block = [*attention, *perceptron, (self.width,), (self.width,)]
        rows: Shape = (self.vocabulary, self.width)
        return [[rows], *[block] * self.blocks, [(self.width,), rows]]

    @property
    def parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(elements(shapes) for shapes in self.shards)


#: The sizes of a decoder of 70 billion parameters that is widely used.
LARGE = Decoder(blocks=80, width=8192, inner=28672, key_heads=8, head=128, vocabulary=32_000)


def elements(shapes: Sequence[Shape]) -> int:
    """Number of elements of parameters of these shapes."""
    return sum(math.prod(shape) for shape in shapes)


@functools.lru_cache(maxsize=64)
def sent_of(shapes: tuple[Shape, ...], ranks: int) -> SentBytes:
    """What a rank sends of a shard with float32 parameters of these shapes, which all take gradients."""
    parts = [Part("", shape, _strides(shape), torch.float32, ranks) for shape in shapes]
    return sent_bytes(parts, [True] * len(parts))


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


class Machine(NamedTuple):
    """What each rank has. Rates in bytes, or operations, a second."""

    flops: float
    disk: float  #: of reads, and of writes
    network: float  #: between machines
    inside: float  #: between the ranks of a machine
    together: int  #: ranks in a machine, which share its network and disk equally; the rates are those of a rank
    latency: float
    copied: float


class Step(NamedTuple):
    """A step of one rank on paper."""

    forecast: Forecast
    traffic: Traffic
    seconds: Mapping[str, float]  #: of compute, of the disk, of collectives, if each were alone
    files: int  #: bytes that a rank stores

    @property
    def bound(self) -> str:
        """The name of the part of the step that takes longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])

    @property
    def total(self) -> float:
        """Seconds of the step: as simulated, where lanes of one disk do not share it; at least its longest part."""
        return max(self.forecast.seconds, *self.seconds.values())

    @property
    def share(self) -> float:
        """The share of the step in which layers compute."""
        return self.forecast.compute_seconds / self.total


def step_on_paper(shards: Sequence[Sequence[Shape]], tokens: int, machine: Machine, ranks: int, replicas: int) -> Step:
    """A training step with AdamW and clipping on ``tokens`` of each rank, each shard recomputed, all in files.

    Gathered are rows of a mesh: within a machine, if a row is no longer than that, else over the network. Replicas
    exchange over the network.
    """
    forward = [FORWARD_FLOPS * elements(shapes) * tokens / machine.flops for shapes in shards]
    nbytes = [4 * elements(shapes) for shapes in shards]
    alone = Costs(
        load=[each / machine.disk for each in nbytes],
        forward=forward,
        backward=[3 * each for each in forward],  # with the recomputation
        drain=[each / machine.disk for each in nbytes],
        # Parameters, gradients and moments are read, all but the gradients are written.
        update=[(2 + STATES + 1 + STATES) * each / machine.disk for each in nbytes],
    )
    sent = [sent_of(tuple(shapes), ranks) for shapes in shards]
    network = Link(machine.network, machine.copied, machine.latency)
    inside = Link(machine.inside, machine.copied, machine.latency)
    row = inside if ranks <= machine.together else network
    costs = costs_of_rank(alone, sent, ranks, row, replicas, network)
    plan = plan_step(len(shards), slots=min(2, len(shards)), clips=True)
    forecast = simulate(with_updates(plan), costs)
    return Step(
        forecast,
        traffic_of(plan, sent, ranks, replicas, norms=1),
        _alone(plan, costs),
        (2 + STATES) * sum(shard.gathered for shard in sent),
    )


def _alone(plan: Plan, costs: Costs) -> dict[str, float]:
    kinds: dict[Kind, list[int]] = {kind: [a.shard for a in plan.actions if a.kind is kind] for kind in Kind}
    loads, drains = kinds[Kind.LOAD], kinds[Kind.DRAIN]
    files = sum(costs.load[j] for j in loads) + sum(costs.drain[j] + costs.update[j] for j in drains)
    exchanged = sum(costs.gather[j] for j in loads) if costs.gather else 0.0
    exchanged += sum(costs.reduce[j] for j in drains) if costs.reduce else 0.0
    computed = sum(costs.forward[j] for j in kinds[Kind.FORWARD]) + sum(costs.backward[j] for j in kinds[Kind.BACKWARD])
    return {"compute": computed, "disk": files, "link": exchanged}


def compute(
    report: Reporter, tokens: int, machines: Sequence[Sequence[float]], meshes: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A case: the steps of :data:`LARGE` over each mesh, on each machine: what bounds it, seconds, share of layers."""
    lines = []
    for replicas, ranks in meshes:
        steps = []
        for flops, disk, network, inside, together, latency, copied in machines:
            machine = Machine(flops, disk, network, inside, int(together), latency, copied)
            steps.append(step_on_paper(LARGE.shards, tokens, machine, ranks, replicas))
        lines.append(
            {
                "mesh": f"{replicas} x {ranks}",
                "steps": [(step.bound, step.total, step.share) for step in steps],
                "files": steps[0].files,
                **asdict(steps[0].traffic),
            }
        )
    return {"meshes": lines}
