"""Computes the peak memory of a step by replaying its plan with the bytes of everything that it holds.

The prediction of a step, the choice of a layout (:mod:`offload.planning.budget`) and the choice of the graphs that are
kept use this one model.

:attr:`PeakMemory.device_bytes` is an upper bound of what the engine then holds on the compute device: a copy is
counted from its submission until the engine waits for it.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from offload.planning.memory_profile import MemoryProfile
from offload.planning.plan import BACKWARD_CELLS, FORWARD_CELLS, GRADIENT_MOVES, Action, Kind, Plan
from offload.planning.planner import Sizes
from offload.planning.residency import WRITES_IN_FLIGHT, Key

__all__ = ["PeakMemory", "StepBytes", "graphs_that_fit", "peak_memory"]


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of what a plan holds."""

    #: Of a slot.
    slot_bytes: int
    #: Of the gradients of each shard's weights, in the type of their home.
    gradient_bytes: Sequence[int]
    #: Whether gradients are stored in the memory that layers compute in.
    gradients_stay: bool = False
    #: Shard -> position in the plan of the first cell after its gradients were stored. Missing: at the next drain.
    drained: Mapping[int, int] = field(default_factory=dict)
    #: Rows of each micro-batch.
    rows: Sequence[int] = (1,)
    #: Of the input of a cell, and of its gradient. Shard ``shards`` stands for the output.
    boundaries: Sizes = lambda key: 0
    gradients: Sizes = lambda key: 0
    #: Shard -> tensors that a cell of it saves for backward, and the shards where they include the cell's input.
    memory_profiles: Mapping[int, MemoryProfile] = field(default_factory=dict)
    profiles_with_boundary: Set[int] = frozenset()


@dataclass
class PeakMemory:
    """Peak bytes, each at its own time."""

    #: Slots, boundaries, their gradients, and gradients of weights that are being stored.
    device_bytes: int
    #: Boundaries and their gradients that are spilled.
    spilled_bytes: int = 0
    #: Tensors saved for backward and allocated in it, without gradients of weights.
    activation_bytes: int = 0
    #: Everything in the memory that layers compute in, with the output and the gradients stored there.
    memory_bytes: int = 0


def peak_memory(plan: Plan, sizes: StepBytes) -> PeakMemory:
    """Replays a plan from its first action to its last."""
    replay = _Replay(plan, sizes)
    for position, action in enumerate(plan.actions):
        replay.perform(position, action)
    return replay.peak


def graphs_that_fit(
    bytes_per_row: Sequence[float | None], rows: Sequence[int], *, first: int, budget_bytes: int
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

    def __init__(self, plan: Plan, sizes: StepBytes) -> None:
        self._sizes = sizes
        self._shards = len(sizes.gradient_bytes)
        self._slots = plan.slots * sizes.slot_bytes
        self.peak = PeakMemory(self._slots, memory_bytes=self._slots)
        backward = [action for action in plan.actions if action.kind in BACKWARD_CELLS]
        self._recomputed = {(a.shard, a.microbatch) for a in backward if a.kind is Kind.BACKWARD}
        self._last_shard = min((a.shard for a in backward), default=0)
        updates = any(a.kind is Kind.UPDATE_IN_BACKWARD for a in plan.actions)
        self._stay = sizes.gradients_stay and not updates
        #: Shards whose gradients are being stored. With updates in backward the engine waits for them one shard later.
        self._draining: deque[int] = deque(maxlen=2 if updates else 1)
        self._at_home = 0
        self._held: dict[_Value, int] = {}
        self._written: dict[_Value, int] = {}
        self._leaving: dict[bool, deque[int]] = {which: deque(maxlen=WRITES_IN_FLIGHT) for which in (False, True)}
        self._graphs: dict[Key, int] = {}
        self._output_bytes = sum(sizes.boundaries((self._shards, i)) for i in range(len(sizes.rows)))
        self._output_gradients = 0

    def perform(self, position: int, action: Action) -> None:
        """Counts one action."""
        kind, j, i = action.kind, action.shard, action.microbatch or 0
        if kind in FORWARD_CELLS:
            self._forward((j, i), keeps=kind is Kind.FORWARD_KEPT)
        elif kind in BACKWARD_CELLS:
            self._put_output_gradients(len(self._sizes.rows))
            self._backward((j, i), position)
        elif kind is Kind.DRAIN:
            self._drain(j)
        elif action.microbatch is not None:
            self._move(kind, (kind in GRADIENT_MOVES, j, i))
        else:
            return
        self._count_device()

    def _forward(self, cell: Key, *, keeps: bool) -> None:
        (j, i), sizes = cell, self._sizes
        if keeps and j in sizes.memory_profiles:
            # The profile of a recomputed cell does not include its boundary.
            own = 0 if j in sizes.profiles_with_boundary else self._held.get((False, j, i), 0)
            self._graphs[cell] = own + sizes.memory_profiles[j].kept_bytes(sizes.rows[i])
        if cell not in self._recomputed:
            self._drop((False, j, i))
        if j + 1 < self._shards:
            self._held[False, j + 1, i] = sizes.boundaries((j + 1, i))

    def _backward(self, cell: Key, position: int) -> None:
        j, i = cell
        onward = self._sizes.gradients(cell) if j > self._last_shard else 0
        if j in self._sizes.memory_profiles:
            self._count_cell(cell, position, onward)
        self._graphs.pop(cell, None)
        self._drop((True, j + 1, i))
        self._drop((False, j, i))
        if j > self._last_shard:
            self._held[True, j, i] = onward

    def _put_output_gradients(self, count: int) -> None:
        """Stores the gradients of the output one by one; each may be spilled before the next is stored."""
        for i in range(self._output_gradients, count):
            self._held[True, self._shards, i] = self._sizes.gradients((self._shards, i))
        self._count_device()
        self._output_gradients = max(self._output_gradients, count)

    def _drain(self, j: int) -> None:
        if self._stay:
            self._at_home += self._sizes.gradient_bytes[j]
            return
        # The engine waits for the previous shard's gradients only when these are complete.
        self._count_device(self._sizes.gradient_bytes[j])
        self._draining.append(j)

    def _move(self, kind: Kind, value: _Value) -> None:
        """Spills, prefetches or forgets a boundary or a gradient of one."""
        gradient, j, i = value
        if gradient and j == self._shards:
            self._put_output_gradients(i + 1)  # beside the two before it, which are still being written
        if kind in (Kind.PREFETCH, Kind.PREFETCH_GRADIENT):
            self._held[value] = self._written[value]
            return
        nbytes = self._held.pop(value, 0)
        if kind in (Kind.SPILL, Kind.SPILL_GRADIENT):
            self._written[value] = nbytes
            self._leaving[gradient].append(nbytes)
            self.peak.spilled_bytes = max(self.peak.spilled_bytes, sum(self._written.values()))

    def _drop(self, value: _Value) -> None:
        self._held.pop(value, None)
        self._written.pop(value, None)

    # --- what is counted ----------------------------------------------------------------------------------------

    def _boundaries(self, *, output: bool) -> int:
        """Boundaries and their gradients; with those of the ``output``, or without."""
        held = sum(nbytes for (_, j, _), nbytes in self._held.items() if output or j < self._shards)
        return held + sum(map(sum, self._leaving.values()))

    def _count_device(self, more: int = 0) -> None:
        gradients = sum(self._sizes.gradient_bytes[j] for j in self._draining)
        now = self._slots + gradients + self._boundaries(output=True) + more
        self.peak.device_bytes = max(self.peak.device_bytes, now)

    def _count_cell(self, cell: Key, position: int, onward: int) -> None:
        """Counts a backward cell at its peak."""
        (j, i), sizes = cell, self._sizes
        profile, rows = sizes.memory_profiles[j], sizes.rows[i]
        kept = sum(self._graphs.values())
        if cell in self._graphs:
            kept -= profile.kept_bytes(rows)  # the profile's peak includes it
        late = (k for k in self._draining if position < sizes.drained.get(k, position + 1))
        gradients = self._at_home + sum(sizes.gradient_bytes[k] for k in late)
        # The user has the output, and autograd its gradient, until backward is over.
        outside = self._slots + self._boundaries(output=False) + onward + gradients + 2 * self._output_bytes
        inside = profile.peak_bytes(rows, sizes.gradient_bytes[j], adds=i > 0)
        self.peak.memory_bytes = max(self.peak.memory_bytes, outside + kept + inside)
        self.peak.activation_bytes = max(self.peak.activation_bytes, kept + profile.peak_bytes(rows, 0))
