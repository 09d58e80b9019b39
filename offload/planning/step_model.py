"""What is known about the steps of a model, and what decides the plan of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import mul
from typing import NamedTuple

from offload.planning.memory_profile import MemoryProfile
from offload.planning.plan import Kind
from offload.policy import MemoryPolicy

__all__ = [
    "LEAST_SLOTS",
    "MOVING",
    "WRITES_IN_FLIGHT",
    "Choice",
    "Costs",
    "Key",
    "OutsideBytes",
    "Sizes",
    "StepModel",
    "Updates",
]

#: (shard, micro-batch) of a cell.
Key = tuple[int, int]
#: By shard and rows: the bytes of the boundary that enters a cell, or of its gradient.
Sizes = Callable[[int, float], int]

#: Least slots, where there are so many shards: one computes, one is loaded ahead.
LEAST_SLOTS = 2
#: Maximum number of boundaries that are being written at a time.
WRITES_IN_FLIGHT = 2
#: Boundaries in motion: one that a layer reads, one that is being read back, those being written.
MOVING = 2 + WRITES_IN_FLIGHT


@dataclass(frozen=True)
class Choice:
    """What decides the plan of a step."""

    slots: int
    #: Shards that rest in the memory that layers compute in.
    in_memory: frozenset[int] = frozenset()
    #: Cells (shard, micro-batch) that keep their graphs from forward to backward.
    kept: frozenset[Key] = frozenset()
    #: For boundaries; their gradients get as many.
    boundary_bytes: float = math.inf
    #: Shards whose gradients wait in memory for their update.
    waiting: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return (
            f"{self.slots} slots, {len(self.in_memory)} shards in memory, {len(self.kept)} graphs kept, gradients of "
            f"{len(self.waiting)} shards waiting"
        )


class Updates(NamedTuple):
    """What optimizers add to a step."""

    #: Shards that must be updated before they are loaded, or used in memory.
    pending: frozenset[int] = frozenset()
    #: Whether a shard is updated as soon as its gradients are drained.
    in_backward: bool = False


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of layers, and of copies and updates by their bytes (of updates: of gradients)."""

    #: Of one cell of each shard. ``backward`` includes the recomputation, which ``kept_backward`` does not need.
    forward: Sequence[float] = ()
    backward: Sequence[float] = ()
    kept_backward: Sequence[float] = ()
    #: Of loads from homes in files, and from shards that rest in host memory beside a device.
    load: float = 0.0
    load_from_memory: float = 0.0
    #: Of gradients to files, and from a device to host memory: nothing moves there where layers compute in it.
    drain: float = 0.0
    drain_to_memory: float = 0.0
    #: Of updates in files, and in host memory.
    update: float = 0.0
    update_in_memory: float = 0.0
    #: Of a copy of a boundary or its gradient.
    boundary: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OutsideBytes:
    """Bytes of what stays on the compute device and belongs to no shard: parameters around blocks, and adapters."""

    #: Parameters and buffers.
    values: int = 0
    #: Of optimizers; 0 before the first update.
    states: int = 0
    #: Shard -> gradients that the code before it makes in backward; shard ``shards``: the code after the last one.
    made_before: Mapping[int, int] = field(default_factory=dict)
    #: The same of gradients that are copied there, since code before another shard makes a part of them, too.
    copied_before: Mapping[int, int] = field(default_factory=dict)
    #: Shard -> gradients of adapters in it, which stay.
    made_in: Mapping[int, int] = field(default_factory=dict)
    #: Gradients that are there when a step begins.
    held: int = 0
    #: What code around blocks holds from its forward to its backward.
    activations: int = 0
    #: What ranks take at the end of a backward to reduce gradients.
    reducing: int = 0

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that one backward makes."""
        return sum(self.made_before.values()) + sum(self.made_in.values())

    def rise(self, j: int, *, several: bool) -> int:
        """Most bytes that the code before shard ``j`` adds in backward; ``several``: micro-batches.

        A second gradient of a parameter is there beside the first one and beside their sum, where autograd does not add
        in place: not to a view, as that of a matrix that a head has transposed.
        """
        made, copied = self.made_before.get(j, 0), 2 * self.copied_before.get(j, 0)
        return made + (max(made, copied) if several else copied)

    @property
    def begins(self) -> int:
        """There when a step begins."""
        return self.values + self.states + self.held


class CellBytes(NamedTuple):
    """Bytes of one cell."""

    #: Of the boundary that enters it; of the gradient of that.
    enters: int
    gradient: int
    #: What its forward saves if it is recomputed; the graph that it keeps; results that it keeps if recomputed.
    saved: int
    graph: int
    selected: int
    #: At the peak of its backward, recomputed or with its graph, with the gradients of its weights.
    backward: int
    kept_backward: int


_NOTHING = MemoryProfile(1, ())


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """What is known about the steps of a model: sizes, and measured seconds."""

    shards: int
    #: The first shard that backward has to reach.
    first: int = 0
    costs: Costs = field(default_factory=Costs)
    updates: Updates = field(default_factory=Updates)
    #: Rows of each micro-batch.
    rows: Sequence[float] = (1,)
    #: Bytes of a slot for each shard, and of what a load of it reads.
    slot_bytes: Sequence[int]
    loaded_bytes: Sequence[int] = ()
    #: Whether much larger shards have buffers of their own beside the slots.
    own_slots: bool = False
    #: Of the gradients of each shard's weights, in the type of their home.
    gradient_bytes: Sequence[int]
    #: Of ranks: the same from their drain to the next one, which reduces them first.
    draining_bytes: Sequence[int] = ()
    #: And of what each of them stores.
    stored_bytes: Sequence[int] = ()
    #: Of the input of a cell, and of its gradient. Shard ``shards`` stands for the output.
    boundaries: Sizes = lambda shard, rows: 0
    gradients: Sizes = lambda shard, rows: 0
    #: Whether boundaries can be spilled, and whether cells add to the boundary that enters them, see :class:`.Plan`.
    #: Bytes are those at their end.
    spills: bool = True
    grows: bool = False
    #: Shard -> tensors that a recomputed cell saves for backward, without its input; and one that keeps its graph.
    recomputed: Mapping[int, MemoryProfile] = field(default_factory=dict)
    kept: Mapping[int, MemoryProfile] = field(default_factory=dict)
    #: Shard -> bytes per row that a recomputed cell keeps until its backward: results of chosen operations.
    selected_bytes_per_row: Mapping[int, float] = field(default_factory=dict)
    #: Shard -> what autocast keeps of its weights in another type where they rest in memory.
    cast_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Shard -> weights and optimizer states while it rests in memory, without gradients. Missing where it cannot.
    resting_bytes: Mapping[int, int] = field(default_factory=dict)
    #: Held all the time: homes in the memory that layers compute in, whatever is chosen; buffers of transfers; and of
    #: updates in files: there are none where all shards rest in memory.
    home_bytes: int = 0
    transfer_bytes: int = 0
    buffer_bytes: int = 0
    outside: OutsideBytes = field(default_factory=OutsideBytes)
    #: Whether gradients of all shards are stored in the memory that layers compute in, whatever is chosen.
    gradients_stay: bool = False
    #: The shards whose gradients are there when the step begins; None: as after a step of the same plan.
    begins: Set[int] | None = None
    #: Whether gradients in memory stay there from one backward to the next: they are accumulated, or zeroed in place.
    accumulates: bool = False
    #: Whether the gradients of a shard can wait in memory.
    gradients_wait: bool = False
    #: Bytes of host memory for these where layers compute on a device of its own; None: they wait in the memory that
    #: layers compute in.
    host_bytes: int | None = None
    #: Beside a device: shards that rest in host memory although their homes are files, with their gradients.
    in_host: frozenset[int] = frozenset()
    #: The shards that are updated in place as soon as the optimizer steps, besides those that a choice rests in memory.
    updated_at_step: Set[int] = frozenset()
    #: Of a report: bytes that measured steps took beside what is counted.
    beside_bytes: int = 0
    #: What is not chosen but given; its bytes are upper limits.
    given: MemoryPolicy = field(default_factory=MemoryPolicy)

    @cached_property
    def cells(self) -> Sequence[Sequence[CellBytes]]:
        """The bytes of each cell, by shard and micro-batch."""
        last, cell = len(self.rows) - 1, cache(self._cell)  # autograd runs the last micro-batch first
        return [[cell(j, rows, i < last) for i, rows in enumerate(self.rows)] for j in range(self.shards)]

    def _cell(self, j: int, rows: float, adds: bool) -> CellBytes:
        recomputed, kept = self.recomputed.get(j, _NOTHING), self.kept.get(j, _NOTHING)
        own = self.gradient_bytes[j]
        return CellBytes(
            self.boundaries(j, rows) if j or self.grows else 0,
            self.gradients(j, rows) if j > self.first else 0,
            recomputed.kept_bytes(rows),
            kept.kept_bytes(rows),
            int(self.selected_bytes_per_row.get(j, 0.0) * rows),
            recomputed.peak_bytes(rows, own, adds=adds),
            kept.peak_bytes(rows, own, adds=adds),
        )

    def seconds(self, choice: Choice) -> Mapping[Kind, Sequence[float]]:
        """Seconds of each kind of action, by shard: what rests or waits in memory is not written to files."""
        costs, gradients, everything = self.costs, self.stored_bytes or self.gradient_bytes, range(self.shards)
        to_memory = self.in_host | choice.waiting
        load = [costs.load_from_memory if j in self.in_host else costs.load for j in everything]
        drain = [costs.drain_to_memory if j in to_memory else costs.drain for j in everything]
        update = [costs.update_in_memory if j in self.updated_at_step else costs.update for j in everything]
        for j in choice.in_memory:
            # On a device, updates are kernels among those of the layers.
            drain[j], update[j] = 0.0, costs.update_in_memory if self.host_bytes is None else 0.0
        updates = [*map(mul, update, gradients)]
        boundary = [costs.boundary * self.boundaries(j, self.rows[0]) for j in everything]
        return {
            Kind.LOAD: [*map(mul, load, self.loaded_bytes)], Kind.DRAIN: [*map(mul, drain, gradients)],
            Kind.UPDATE: updates, Kind.UPDATE_IN_BACKWARD: updates,
            Kind.FORWARD: costs.forward, Kind.FORWARD_KEPT: costs.forward,
            Kind.BACKWARD: costs.backward, Kind.BACKWARD_KEPT: costs.kept_backward,
            Kind.SPILL: boundary, Kind.PREFETCH: boundary,
        }  # fmt: skip
