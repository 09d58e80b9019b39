"""Computes the memory of a step by replaying its plan with the bytes of everything that it holds.

The prediction of a step, the least that a layout needs (:mod:`offload.planning.budget`), the choice of the graphs that
are kept and the choice of a plan (:mod:`offload.planning.choose`) use this one model.

:attr:`PeakMemory.device_bytes` is an upper bound of what the engine then holds on the compute device: a copy is
counted from its submission until the engine waits for it.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from offload.planning.memory_profile import MemoryProfile
from offload.planning.plan import BACKWARD_CELLS, FORWARD_CELLS, Action, Kind, Plan
from offload.planning.planner import Sizes
from offload.planning.residency import WRITES_IN_FLIGHT, Key

__all__ = ["Moment", "OutsideBytes", "PeakMemory", "StepBytes", "graphs_that_fit", "peak_memory"]


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


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of what a plan holds."""

    #: Of a slot.
    slot_bytes: int
    #: Shard -> bytes of a buffer that it has beside the slots while it is loaded.
    own_slots: Mapping[int, int] = field(default_factory=dict)
    #: Of the gradients of each shard's weights, in the type of their home.
    gradient_bytes: Sequence[int]
    #: The same from their drain to the next one, where it is more: of ranks that reduce them first.
    draining_bytes: Sequence[int] = ()
    #: The shards whose gradients are stored in the memory that layers compute in; and those whose gradients wait there
    #: for an update at the beginning of the next step.
    gradients_stay: Set[int] = frozenset()
    waiting: Set[int] = frozenset()
    #: The shards whose gradients are there during the whole step, and are added to: of an earlier backward, or zeros.
    held: Set[int] = frozenset()
    #: The shards whose gradients are there when the step begins, for updates that are pending; None: those of
    #: ``waiting`` and ``gradients_stay``, as after a step of the same plan.
    begins: Set[int] | None = None
    #: Rows of each micro-batch.
    rows: Sequence[float] = (1,)
    #: Of the input of a cell, and of its gradient. Shard ``shards`` stands for the output.
    boundaries: Sizes = lambda key: 0
    gradients: Sizes = lambda key: 0
    #: Shard -> tensors that a recomputed cell of it saves for backward, without its input.
    memory_profiles: Mapping[int, MemoryProfile] = field(default_factory=dict)
    #: The same of a cell that keeps its graph, with its input; or as yet only the bytes of that graph per row.
    kept_profiles: Mapping[int, MemoryProfile] = field(default_factory=dict)
    graph_bytes_per_row: Mapping[int, float] = field(default_factory=dict)
    #: Shard -> bytes per row that a recomputed cell keeps until its backward: results of chosen operations.
    selected_bytes_per_row: Mapping[int, float] = field(default_factory=dict)
    #: Held all the time: homes in that memory, buffers.
    constant_bytes: int = 0
    #: Whether cells add to the boundary that enters them, or make it: see :class:`.Plan`. Bytes are those at their end.
    grows: bool = False
    #: Of what is in no shard.
    outside: OutsideBytes = field(default_factory=OutsideBytes)

    def bytes_of_graph(self, cell: Key) -> int:
        """Bytes of a kept graph, without the cell's input where only recomputed cells were measured."""
        j, i = cell
        if j not in self.kept_profiles and j in self.graph_bytes_per_row:
            return int(self.graph_bytes_per_row[j] * self.rows[i])
        profile = self.kept_profiles.get(j) or self.memory_profiles.get(j)
        return 0 if profile is None else profile.kept_bytes(self.rows[i])


@dataclass
class PeakMemory:
    """Peak bytes, each at its own time."""

    #: Slots, boundaries, their gradients, and gradients of weights that are being stored.
    device_bytes: int
    #: Boundaries that are spilled.
    spilled_bytes: int = 0
    #: Tensors saved for backward and allocated in it, without gradients of weights.
    activation_bytes: int = 0
    #: Everything in the memory that layers compute in, with the output and the gradients stored there; and when the
    #: step begins.
    memory_bytes: int = 0
    begin_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes of each kind in the memory that layers compute in: while one cell runs, or code around cells."""

    position: int  #: in the plan
    weights: int
    gradients: int
    boundaries: int
    graphs: int
    #: Of what runs: what it saves for backward or allocates there, and the gradients of its weights.
    cell: int
    #: The output and its gradient, and what is held all the time.
    others: int
    #: Of what is in no shard: parameters, their gradients and optimizer states.
    outside: int

    @property
    def nbytes(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.gradients + self.boundaries + self.graphs + self.cell + self.others + self.outside


def peak_memory(plan: Plan, sizes: StepBytes, course: list[Moment] | None = None) -> PeakMemory:
    """Replays a plan from its first action to its last.

    ``course`` gets the memory at the begin, during each cell and the code around it, and at the end: the most of these
    is the peak.
    """
    replay = _Replay(plan, sizes, course)
    for position, action in enumerate(plan.actions):
        replay.perform(position, action)
    replay.end(len(plan.actions))
    return replay.peak


def graphs_that_fit(
    bytes_per_row: Sequence[float | None], rows: Sequence[float], *, first: int, budget_bytes: int
) -> frozenset[Key]:
    """The cells that keep their graphs: those that backward begins with, up to the first that does not fit.

    Backward frees kept graphs before it recomputes a cell, so their bytes are not added to those of a recomputed cell.
    ``bytes_per_row``: of the graph of each shard; None where it was not measured yet.
    """
    kept: list[Key] = []
    left = float(budget_bytes)
    for j in range(len(bytes_per_row) - 1, first - 1, -1):
        each = bytes_per_row[j]
        if each is None:
            break
        for i, count in enumerate(rows):
            left -= each * count
            if left < 0:
                return frozenset(kept)
            kept.append((j, i))
    return frozenset(kept)


#: (is a gradient, shard, micro-batch)
_Value = tuple[bool, int, int]


class _Replay:
    """The contents of memory after each action."""

    def __init__(self, plan: Plan, sizes: StepBytes, course: list[Moment] | None) -> None:
        self._sizes = sizes
        self._course = course
        self._shards = len(sizes.gradient_bytes)
        self._drained_sizes = sizes.draining_bytes or sizes.gradient_bytes
        self._slots = plan.slots * sizes.slot_bytes + sum(sizes.own_slots.get(j, 0) for j in plan.resident)
        #: With the gradients that are made in this step.
        self._outside = sizes.outside.begins + sizes.outside.activations
        self._made_before: set[int] = set()
        backward = [action for action in plan.actions if action.kind in BACKWARD_CELLS]
        self._recomputed = {(a.shard, a.microbatch) for a in backward if a.kind is Kind.BACKWARD}
        self._last_shard = min((a.shard for a in backward), default=0)
        self._updates = any(a.kind is Kind.UPDATE_IN_BACKWARD for a in plan.actions)
        #: Shards whose gradients are being stored. With updates in backward the engine waits for them one shard later.
        self._draining: deque[int] = deque(maxlen=2 if self._updates else 1)
        #: Shards that are being updated, with gradients of the step before.
        waiting = sizes.waiting | sizes.gradients_stay if sizes.begins is None else sizes.begins
        self._waiting = set((waiting & plan.pending) - sizes.held)
        self._at_home = sum(sizes.gradient_bytes[j] for j in self._waiting | sizes.held)
        at_begin = self._slots + sizes.constant_bytes + self._at_home + sizes.outside.begins
        self.peak = PeakMemory(self._slots, memory_bytes=at_begin, begin_bytes=at_begin)
        self._held: dict[_Value, int] = {}
        #: Of :attr:`_held`, boundaries and gradients of the output.
        self._held_bytes = self._output_gradient_bytes = 0
        self._written: dict[Key, int] = {}
        self._written_bytes = 0
        self._leaving: deque[int] = deque(maxlen=WRITES_IN_FLIGHT)
        # Sums of what is in these queues: they are read for every action of every plan that is tried.
        self._draining_bytes = self._leaving_bytes = 0
        self._graphs: dict[Key, int] = {}
        self._graph_bytes = 0
        self._output_bytes = sum(sizes.boundaries((self._shards, i)) for i in range(len(sizes.rows)))
        #: Whether the backward has begun.
        self._output_gradients = False
        if course is not None:
            begin = (self._slots, self._at_home, 0, 0, 0, sizes.constant_bytes, sizes.outside.begins)
            course.append(Moment(0, *begin))

    def perform(self, position: int, action: Action) -> None:
        """Counts one action."""
        kind, j, i = action.kind, action.shard, action.microbatch or 0
        if kind in FORWARD_CELLS:
            self._forward((j, i), position, keeps=kind is Kind.FORWARD_KEPT)
        elif kind in BACKWARD_CELLS:
            self._put_output_gradients()
            self._backward((j, i), position)
        elif kind is Kind.DRAIN:
            self._drain(j)
        elif action.microbatch is not None:
            self._move(kind, (j, i))
        elif kind in (Kind.LOAD, Kind.EVICT) and j in self._sizes.own_slots:
            own = self._sizes.own_slots[j]
            self._slots += own if kind is Kind.LOAD else -own
        else:
            return
        self._count_device()

    def end(self, position: int) -> None:
        """Counts what is left for the update of parameters in no shard, which is not a part of a plan."""
        if self._outside:
            self._count_memory(position, self._sizes.outside.reducing, 0)

    def _forward(self, cell: Key, position: int, *, keeps: bool) -> None:
        (j, i), sizes = cell, self._sizes
        profile = self._profile(j, keeps=keeps)
        if j in self._waiting:
            # A shard computes when its update is done, which frees the gradients.
            self._waiting.discard(j)
            self._at_home -= sizes.gradient_bytes[j]
        following = sizes.boundaries((j + 1, i)) if j + 1 < self._shards else 0
        if profile is not None:
            self._count_memory(position, profile.kept_bytes(sizes.rows[i]), following)
        if keeps and profile is not None:
            self._graphs[cell] = self._bytes_of_graph(cell)
            self._graph_bytes += self._graphs[cell]
        if not keeps and cell in self._recomputed:
            self._graph_bytes += self._selected_bytes(cell)
        if cell not in self._recomputed:
            self._drop(cell)
        elif sizes.grows:
            self._written_bytes -= self._written.pop(cell, 0)
            if j == 0:
                self._hold((False, j, i), sizes.boundaries(cell))
        if j + 1 < self._shards:
            self._hold((False, j + 1, i), following)

    def _backward(self, cell: Key, position: int) -> None:
        (j, i), sizes = cell, self._sizes
        onward = sizes.gradients(cell) if j > self._last_shard else 0
        kept = self._graphs.pop(cell, None)
        if kept is None:
            self._graph_bytes -= self._selected_bytes(cell)  # from now on they are a part of its graph
        profile = self._profile(j, keeps=kept is not None)
        if profile is not None:
            # What a profile frees is not more than the graph holds.
            own = max(0, kept - profile.kept_bytes(sizes.rows[i])) if kept is not None else 0
            adds = i + 1 < len(sizes.rows)  # autograd runs the last micro-batch first
            inside = profile.peak_bytes(sizes.rows[i], sizes.gradient_bytes[j], adds=adds)
            self._graph_bytes -= kept or 0
            self._count_memory(position, own + inside, onward)
            graphs = self._graph_bytes + own + profile.peak_bytes(sizes.rows[i], 0)
            self.peak.activation_bytes = max(self.peak.activation_bytes, graphs)
        self._release((True, j + 1, i))
        self._drop(cell)
        if j > self._last_shard:
            self._hold((True, j, i), onward)
        self._make_outside(j, position)

    def _make_outside(self, j: int, position: int) -> None:
        """Counts the code before shard ``j``: its gradients are added to those of earlier micro-batches."""
        sizes = self._sizes
        rise = sizes.outside.rise(j, several=len(sizes.rows) > 1)
        if not rise:
            return
        made = sizes.outside.made_before.get(j, 0)
        if j not in self._made_before:
            self._made_before.add(j)
            self._outside += made
        own = sizes.gradient_bytes[j] if j < self._shards else 0
        self._count_memory(position, own + rise - made, 0)

    def _profile(self, j: int, *, keeps: bool) -> MemoryProfile | None:
        known, others = self._sizes.kept_profiles, self._sizes.memory_profiles
        if not keeps:
            known, others = others, known
        return known.get(j) or others.get(j)

    def _bytes_of_graph(self, cell: Key) -> int:
        (j, i), sizes = cell, self._sizes
        # The profile of a recomputed cell does not include its boundary.
        apart = j not in sizes.kept_profiles and j not in sizes.graph_bytes_per_row
        return sizes.bytes_of_graph(cell) + (self._held.get((False, j, i), 0) if apart else 0)

    def _selected_bytes(self, cell: Key) -> int:
        return int(self._sizes.selected_bytes_per_row.get(cell[0], 0.0) * self._sizes.rows[cell[1]])

    def _put_output_gradients(self) -> None:
        if self._output_gradients:
            return
        for i in range(len(self._sizes.rows)):
            self._hold((True, self._shards, i), self._sizes.gradients((self._shards, i)))
        self._count_device()
        self._make_outside(self._shards, 0)
        self._output_gradients = True

    def _drain(self, j: int) -> None:
        sizes = self._sizes
        self._outside += sizes.outside.made_in.get(j, 0)
        # Of shards that rest in memory an optimizer takes them when it steps, also if it updates others in backward.
        stays = j in sizes.waiting or (j in sizes.gradients_stay and not self._updates)
        if stays and j not in sizes.held:
            self._at_home += sizes.gradient_bytes[j]
            return
        # The engine waits for the previous shard's gradients only when these are complete.
        self._count_device(sizes.gradient_bytes[j])
        self._draining.append(j)
        self._draining_bytes = sum(self._drained_sizes[k] for k in self._draining)

    def _move(self, kind: Kind, cell: Key) -> None:
        """Spills, prefetches or forgets a boundary."""
        if kind is Kind.PREFETCH:
            self._hold((False, *cell), self._written[cell])
            return
        nbytes = self._release((False, *cell))
        if kind is Kind.SPILL:
            self._written[cell] = nbytes
            self._written_bytes += nbytes
            self._leaving.append(nbytes)
            self._leaving_bytes = sum(self._leaving)
            self.peak.spilled_bytes = max(self.peak.spilled_bytes, self._written_bytes)

    def _hold(self, value: _Value, nbytes: int) -> None:
        self._held[value] = nbytes
        if value[1] < self._shards:
            self._held_bytes += nbytes
        else:
            self._output_gradient_bytes += nbytes

    def _release(self, value: _Value) -> int:
        nbytes = self._held.pop(value, 0)
        if value[1] < self._shards:
            self._held_bytes -= nbytes
        else:
            self._output_gradient_bytes -= nbytes
        return nbytes

    def _drop(self, cell: Key) -> None:
        """Drops a boundary."""
        self._release((False, *cell))
        self._written_bytes -= self._written.pop(cell, 0)

    # --- what is counted ----------------------------------------------------------------------------------------

    @property
    def _boundary_bytes(self) -> int:
        """Boundaries and their gradients, without those of the output."""
        return self._held_bytes + self._leaving_bytes

    def _count_device(self, more: int = 0) -> None:
        now = self._slots + self._draining_bytes + self._boundary_bytes + self._output_gradient_bytes + more
        if now > self.peak.device_bytes:
            self.peak.device_bytes = now

    def _count_memory(self, position: int, inside: int, following: int) -> None:
        """Counts a cell at its peak, with the boundary or gradient that it makes."""
        parts = self._parts(position, following, inside)
        self.peak.memory_bytes = max(self.peak.memory_bytes, sum(parts))
        if self._course is not None:
            self._course.append(Moment(position, *parts))

    def _parts(self, position: int, following: int = 0, inside: int = 0) -> tuple[int, int, int, int, int, int, int]:
        """The bytes of each kind at a position of the plan, in the order of :class:`Moment`."""
        sizes = self._sizes
        return (
            self._slots,
            self._at_home + self._draining_bytes,
            self._boundary_bytes + following,
            self._graph_bytes,
            inside,
            # The user has the output, and autograd its gradient, until backward is over.
            sizes.constant_bytes + (2 * self._output_bytes if self._output_gradients else 0),
            self._outside,
        )
