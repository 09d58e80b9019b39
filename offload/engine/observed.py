"""Observes one step: what it did, as a plan, and the sizes and seconds that later plans follow from.

A model with a limit of memory measures its first steps of each size: bytes of boundaries and of saved tensors, seconds
of cells. Its planner decides, when a step begins, which cells keep their graphs and how many bytes of boundaries stay
in memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload.engine.homes import ModelHomes
from offload.engine.recorder import Recorder
from offload.engine.sizes import bytes_of_boundary, is_plain, largest_rows, rounded_up
from offload.planning.memory_profile import MemoryProfile
from offload.planning.plan import Action, Kind, Plan
from offload.streaming.shard import Shard
from pipe.nested import tensors_in

__all__ = ["CellPlace", "ObservedStep"]

#: Steps of each size in which saved tensors are recorded.
STEPS_RECORDED = 3


@dataclass(frozen=True)
class CellPlace:
    """Block ``k`` of the ``blocks`` of shard ``j``, for micro-batch ``i``; whether it keeps a graph."""

    j: int
    k: int
    blocks: int
    i: int
    kept: bool


class ObservedStep:
    """One forward, with its backward if it has one.

    Args:
        homes: what knows sizes and plans of the model.
        leaves: of the input of each micro-batch.
        training: whether gradients are computed.
        idle: whether no earlier forward waits for its backward.
    """

    def __init__(self, homes: ModelHomes, leaves: Sequence[Sequence[Any]], *, training: bool, idle: bool) -> None:
        self._homes, self._steps, self._meter = homes, homes.steps, homes.meter
        self.training = training
        units = homes.row_units
        self.rows = [units.count(each) for each in leaves]
        samples = [largest_rows(each) for each in leaves]
        rounded = [*map(rounded_up, self.rows, samples)]
        if training:
            self._meter.begin_step()
            if (planner := self._steps.planner) is not None:
                planner.check_first(leaves)
                rounded = [*planner.begin(self.rows, rounded, samples=sum(samples), idle=idle)]
        #: The sizes for which it is planned.
        self.planned = rounded
        first = homes.first_trainable()
        self.kept = self._steps.kept_cells(self.rows, first) if training else frozenset()
        self.actions: list[Action] = []
        self.pending = homes.streamer.pending()
        #: Those of them that are still to come in the plan.
        self._to_update = set(self.pending)
        self.resident = homes.streamer.resident()
        self._open: contextlib.AbstractContextManager[None] | None = None
        #: The cell whose backward has begun last.
        self.cell: CellPlace | None = None
        self._ended = False
        #: Of the cell that runs forward: the tensors that have entered its blocks, and their bytes.
        self._entered: dict[int, int] = {}
        self._boundary_bytes = 0
        #: Nodes of the forward that were looked at, and the parameters outside of blocks that they use.
        self._nodes: set[Any] = set()
        self._used_outside: dict[int, tuple[int, set[int]]] = {}

    def act(self, kind: Kind, j: int, i: int | None = None) -> None:
        """Adds to the plan."""
        if kind is Kind.LOAD and j in self._to_update:  # it was updated when its parameters were read
            self.act(Kind.UPDATE, j)
        if kind is Kind.UPDATE:
            self._to_update.discard(j)
        if kind is Kind.DRAIN:
            self._return_excess()
        self.actions.append(Action(kind, j, i))

    def enter(self, cell: CellPlace, block: int, value: Any) -> None:
        """Called with what enters a cell; ``block``: the number of its block in the model."""
        j, k, i = cell.j, cell.k, cell.i
        tensors = {id(x): bytes_of_boundary(x) for x in tensors_in(value)}
        if j == 0 and k == 0:
            self._steps.around_per_row = sum(tensors.values()) / (self.rows[i] or 1) if self._homes.blocks else 0.0
        elif i == 0 and math.isfinite(self._steps.boundary_budget_bytes):  # of boundaries, these alone are not spilled
            staying = sum({id(x): bytes_of_boundary(x) for x in tensors_in(value) if not is_plain(x)}.values())
            self._steps.around_per_row += staying / (self.rows[i] or 1)
        # What several blocks of a shard get, such as a mask, is one boundary of the first.
        if k == 0:
            self._entered, self._boundary_bytes = {}, 0
        new = sum(nbytes for key, nbytes in tensors.items() if key not in self._entered)
        self._entered |= tensors
        if j or k:
            self._boundary_bytes += new
            self._steps.boundaries.add(j, self.rows[i], self._boundary_bytes)
        if j and k == 0:
            self._steps.gradients.add(j, self.rows[i], new)
        self._code_before(block, value)

    def _code_before(self, block: int, value: Any) -> None:
        """Called with what enters a block, or leaves a forward: notes which parameters the code before it uses.

        Autograd adds their gradients in one buffer each, which is made by the last code that uses it.
        """
        outside, made = self._homes.outside, self._used_outside
        if not (self.training and outside):
            return
        wanted = {id(p): p for p in outside if p.requires_grad}
        nodes = [x.grad_fn for x in tensors_in(value)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._nodes:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                if id(leaf) in wanted:
                    nbytes = leaf.numel() * leaf.element_size()
                    made.setdefault(id(leaf), (nbytes, set()))[1].add(block)
                continue
            self._nodes.add(node)
            nodes += [following for following, _ in node.next_functions]

    def end_forward(self, value: Any) -> None:
        """Called with the result of the forward."""
        if self._homes.blocks:
            self._code_before(len(self._homes.blocks), value)
            self._homes.leaf_gradients = self._used_outside
        self._nodes = set()

    def leave(self, cell: CellPlace, value: Any) -> None:
        """Called with the output of a cell: the code behind it ends there."""
        tensors = tensors_in(value)
        if self._homes.outside:
            self._nodes.update(x.grad_fn for x in tensors if x.grad_fn is not None)
        j = len(self._homes.shards)
        if cell.j == j - 1 and cell.k == cell.blocks - 1:
            nbytes = sum({id(x): bytes_of_boundary(x) for x in tensors}.values())
            self._steps.boundaries.add(j, self.rows[cell.i], nbytes)
            self._steps.gradients.add(j, self.rows[cell.i], nbytes)

    def recorder(self, shard: Shard, i: int, memory: Tensor | None, kept: bool) -> Recorder | None:
        """Records what a cell saves, in the first steps of its size."""
        key = shard.index, self.rows[i], kept
        seen = self._homes.recorded
        if not self.training or seen.get(key, 0) >= STEPS_RECORDED:
            return None
        seen[key] = seen.get(key, 0) + 1
        return Recorder(shard, memory)

    def record(self, recorder: Recorder, cell: CellPlace, entered: Any, *, keeps: bool, hidden: int) -> None:
        """Called after the forward of a cell with what it saved, and the bytes that its graph holds besides."""
        rows, saved = self.rows[cell.i], recorder.saved_tensors([] if keeps else tensors_in(entered))
        profiles = self._meter.kept_profiles if keeps else self._meter.memory_profiles
        profiles.add(cell.j, MemoryProfile(rows, saved), continues=cell.k > 0)
        casts = self._steps.cast_bytes.setdefault(cell.j, {})
        casts[cell.k] = max(casts.get(cell.k, 0), recorder.cast_bytes)
        if not keeps:
            nbytes = sum(recorder.nbytes.values()) + hidden
            self._steps.graph_per_row.setdefault(cell.j, {})[cell.k] = nbytes / (rows or 1)

    def record_selected(self, cell: CellPlace, nbytes: int) -> None:
        """Called with the bytes that a recomputed cell keeps."""
        self._steps.selected_per_row.setdefault(cell.j, {})[cell.k] = nbytes / (self.rows[cell.i] or 1)

    def forward(self, cell: CellPlace) -> contextlib.AbstractContextManager[None]:
        """A context for a cell in forward."""
        kind = Kind.FORWARD_KEPT if cell.kept else Kind.FORWARD
        if cell.k == 0:
            if cell.j in self._to_update:  # a shard in memory that was updated when its parameters were read
                self.act(Kind.UPDATE, cell.j)
            self.act(kind, cell.j, cell.i)
        return self._timed(kind, cell, cell.k)

    def _timed(self, kind: Kind, cell: CellPlace, step: int) -> contextlib.AbstractContextManager[None]:
        self._return_excess()
        return self._meter.cell(kind.value, cell.j, cell.i, self.rows[cell.i], step=step, steps=cell.blocks)

    def _return_excess(self) -> None:
        if self.training and self._steps.planner is not None:
            self._steps.planner.return_excess()

    def begin_backward(self) -> None:
        """Adds to the plan what other passes since the forward have done to the slots."""
        left, found = self.plan().resident_after, frozenset(self._homes.streamer.resident())
        self.actions += [Action(Kind.EVICT, j) for j in sorted(left - found)]
        self.actions += [Action(Kind.LOAD, j) for j in sorted(found - left)]

    def backward(self, cell: CellPlace) -> None:
        """Called when the backward of a cell begins; that of the one before has ended."""
        kind = Kind.BACKWARD_KEPT if cell.kept else Kind.BACKWARD
        if cell.k == cell.blocks - 1:
            self.act(kind, cell.j, cell.i)
        self.cell = cell
        self._open = self._timed(kind, cell, cell.blocks - 1 - cell.k)
        self._open.__enter__()

    def end_cell(self) -> None:
        """Called when autograd leaves the last cell."""
        context, self._open, self.cell = self._open, None, None
        if context is not None:
            context.__exit__(None, None, None)

    def plan(self) -> Plan:
        """What was done."""
        streamer = self._homes.streamer
        return Plan(tuple(self.actions), streamer.slots, self.resident, self.pending, in_memory=streamer.in_place())

    def _add_drains(self) -> None:
        """Adds to the plan that gradients of shards which are used where they rest are stored when they are made."""
        drained = {action.shard for action in self.actions if action.kind is Kind.DRAIN}
        backwards = [(k, a.shard) for k, a in enumerate(self.actions) if a.kind in (Kind.BACKWARD, Kind.BACKWARD_KEPT)]
        last = {j: k for k, j in backwards if j not in drained}
        for k, j in sorted(((k, j) for j, k in last.items()), reverse=True):
            self.actions.insert(k + 1, Action(Kind.DRAIN, j))

    def end(self) -> None:
        """Called when the step has ended."""
        self.end_cell()
        self._add_drains()
        if not self._ended:
            self._ended = True
            self._steps.record_step(self.plan(), self.rows, self.planned, training=self.training)
