"""What is known about the steps of a model, what decides a plan, and what a plan is predicted to cost.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.planning.peak_memory import Moment, PeakMemory, StepBytes, peak_memory
from offload.planning.plan import Plan
from offload.planning.planner import Updates, plan_step
from offload.planning.residency import MOVING, Key, Residency
from offload.planning.simulate import Costs, Forecast, simulate
from offload.planning.slot_sizes import slot_sizes

__all__ = [
    "Choice",
    "Given",
    "Prediction",
    "StepModel",
    "costs_of",
    "predict",
    "predict_plan",
    "predicted_bytes",
    "predicted_seconds",
]


@dataclass(frozen=True)
class Choice:
    """What decides the plan of a step."""

    slots: int
    #: Shards that rest in the memory that layers compute in.
    in_memory: frozenset[int] = frozenset()
    #: Cells that keep their graphs from forward to backward.
    kept: frozenset[Key] = frozenset()
    #: For boundaries; their gradients get as many.
    boundary_bytes: float = math.inf
    #: Shards whose gradients wait in memory for their update.
    waiting: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Given:
    """Choices that a policy fixes; None: what fits is chosen. Bytes are upper limits."""

    slots: int | None = None
    resident_bytes: int | None = None
    graph_bytes: int | None = None
    boundary_bytes: int | None = None
    gradient_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """What is known about the steps of a model: sizes, and measured seconds."""

    shards: int
    #: The first shard that backward has to reach.
    first: int
    costs: Costs
    #: Without graphs that are kept, waiting gradients and shards in memory.
    sizes: StepBytes
    updates: Updates = field(default_factory=lambda: Updates(pending=frozenset(), updates=False, clips=False))
    #: Bytes that a load of each shard reads.
    loaded_bytes: Sequence[int] = ()
    #: Among :attr:`sizes`, homes in the memory that layers compute in, whatever is chosen.
    home_bytes: int = 0
    #: Bytes of each shard that rests in memory: weights and optimizer states, without gradients. Missing where a shard
    #: cannot rest there.
    resting_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Of buffers of updates in files: there are none where all shards rest in memory.
    buffer_bytes: int = 0
    #: Of each shard, what autocast keeps of its weights in another type where they rest in memory.
    cast_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Bytes of a slot for each shard: slots are as large as the largest that is loaded. Empty: as ``sizes`` say.
    slot_bytes: Sequence[int] = ()
    #: Whether much larger shards have buffers of their own beside the slots.
    own_slots: bool = False
    #: Whether boundaries can be spilled.
    spills: bool = True
    #: Least slots, where there are so many shards; a third one is read while the update of a second runs.
    least_slots: int = 2
    #: Whether the gradients of a shard can wait in memory.
    gradients_wait: bool = False
    #: Bytes of host memory for these where layers compute on a device of its own; None: they wait in the memory that
    #: layers compute in.
    host_bytes: int | None = None
    #: Beside a device: shards that rest in host memory, with their gradients.
    in_host: frozenset[int] = frozenset()
    #: Whether gradients in memory stay there from one backward to the next: they are accumulated, or zeroed in place.
    accumulates: bool = False
    #: Added to predicted bytes: what measured steps took more.
    margin_bytes: int = 0
    #: What is not chosen but given.
    given: Given = Given()

    def slot_sizes(self, choice: Choice) -> tuple[int, Mapping[int, int]]:
        """Bytes of a slot, and of each shard that has a buffer of its own."""
        if not self.slot_bytes:
            return self.sizes.slot_bytes, self.sizes.own_slots
        return slot_sizes(self.slot_bytes, choice.slots, in_memory=choice.in_memory, apart=self.own_slots)

    @cached_property
    def boundaries(self) -> tuple[int, int]:
        """Bytes of all boundaries or of all their gradients, whichever are more; and the largest of them."""
        cells = [(j, i) for j in range(self.shards + 1) for i in range(len(self.sizes.rows))]
        each = [[size(cell) for cell in cells] for size in (self.sizes.boundaries, self.sizes.gradients)]
        return max(map(sum, each)), max(map(max, each))


@dataclass(frozen=True)
class Prediction:
    """What a choice is predicted to cost."""

    choice: Choice
    plan: Plan
    seconds: float
    wait_seconds: float
    compute_seconds: float
    #: In the memory that layers compute in, with the margin.
    memory_bytes: int
    peak: PeakMemory
    #: The memory at each moment of the step.
    course: Sequence[Moment]
    #: From which it was made.
    model: StepModel = field(repr=False, compare=False)

    @property
    def margin_bytes(self) -> int:
        """Of :attr:`memory_bytes`, what measured steps took more."""
        return self.model.margin_bytes


def predict_plan(
    model: StepModel, plan: Plan, choice: Choice | None = None, course: list[Moment] | None = None
) -> tuple[Forecast, PeakMemory]:
    """Simulates a plan and replays its memory; ``course``: see :func:`.peak_memory`."""
    chosen = Choice(plan.slots, plan.in_memory) if choice is None else choice
    forecast = simulate(plan, costs_of(model, chosen))
    return forecast, peak_memory(plan, _sizes(model, chosen), course)


def predict(model: StepModel, choice: Choice) -> Prediction:
    """Plans, simulates and replays one choice."""
    plan = _plan(model, choice)
    course: list[Moment] = []
    forecast, peak = predict_plan(model, plan, choice, course)
    return Prediction(
        choice,
        plan,
        forecast.seconds,
        forecast.wait_seconds,
        forecast.compute_seconds,
        peak.memory_bytes + model.margin_bytes,
        peak,
        course,
        model,
    )


def _plan(model: StepModel, choice: Choice) -> Plan:
    rows = model.sizes.rows
    budget = choice.boundary_bytes if model.spills else math.inf
    most, largest = model.boundaries
    return plan_step(
        model.shards,
        slots=choice.slots,
        microbatches=len(rows),
        training=model.first < model.shards,
        first=model.first,
        kept=choice.kept,
        in_memory=choice.in_memory,
        boundaries=Residency(budget) if budget < most + MOVING * largest else None,
        boundary_sizes=model.sizes.boundaries,
        grows=model.sizes.grows,
        **model.updates,
    )


def costs_of(model: StepModel, choice: Choice) -> Costs:
    """The costs of a choice: gradients that wait in memory are not written to files, nor read by their updates."""
    still = choice.in_memory | choice.waiting
    if not still:
        return model.costs
    costs = model.costs
    waiting = costs.waiting_drain or [0.0] * len(costs.drain)
    return replace(costs, drain=[waiting[j] if j in still else seconds for j, seconds in enumerate(costs.drain)])


def _sizes(model: StepModel, choice: Choice) -> StepBytes:
    resting = sum(model.resting_bytes[j] + model.cast_bytes.get(j, 0) for j in choice.in_memory)
    running = max(model.cast_bytes.values(), default=0)  # the same of a shard that streams, or of gradients
    buffers = model.buffer_bytes if len(choice.in_memory) < model.shards else 0
    waiting = choice.in_memory | (choice.waiting if model.host_bytes is None else frozenset())
    slot, own = model.slot_sizes(choice)
    return replace(
        model.sizes,
        slot_bytes=slot,
        own_slots=own,
        waiting=waiting,
        held=model.sizes.held | (waiting | model.sizes.gradients_stay if model.accumulates else frozenset()),
        constant_bytes=model.sizes.constant_bytes + resting + running + buffers,
    )


def predicted_bytes(model: StepModel, choice: Choice) -> int:
    """Predicted bytes, without a simulation: gradients that are being stored count until the next drain."""
    return peak_memory(_plan(model, choice), _sizes(model, choice)).memory_bytes + model.margin_bytes


def predicted_seconds(model: StepModel, choice: Choice) -> float:
    """Predicted seconds, without the memory."""
    return simulate(_plan(model, choice), costs_of(model, choice)).seconds
