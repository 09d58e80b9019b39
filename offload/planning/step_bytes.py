"""Predicts the memory of a step: the bytes that are held while each cell runs, forward and backward.

It follows the order of use that all plans have, and needs no plan. What is on its way counts from its submission until
the engine waits for it, so the result is an upper bound of what the engine then holds.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload.partition import slots_in_use
from offload.planning.step_model import MOVING, WRITES_IN_FLIGHT, Choice, StepModel

__all__ = ["StepBytes", "step_bytes"]


@dataclass
class StepBytes:
    """Peak bytes of a step, each at its own time."""

    #: Everything in the memory that layers compute in; each use of it at that time; and all when the step begins.
    memory: int = 0
    uses: Mapping[str, int] = field(default_factory=dict)
    begin: int = 0
    #: Boundaries that are spilled.
    spilled: int = 0


def step_bytes(model: StepModel, choice: Choice) -> StepBytes:
    """The memory of a step that follows a choice."""
    walk = _Walk(model, choice)
    walk.forward()
    if model.first < model.shards:
        walk.backward()
    return walk.peak


class _Walk:
    """The contents of memory while the cells of a step run."""

    def __init__(self, model: StepModel, choice: Choice) -> None:
        self._model, self._choice = model, choice
        in_memory, outside, count = choice.in_memory, model.outside, model.shards
        there = in_memory if model.host_bytes is not None else in_memory | choice.waiting
        #: Shards whose gradients stay after their drain. Of those that rest in memory an optimizer takes them when it
        #: steps, also if it updates others in backward.
        home = frozenset(range(count)) if model.gradients_stay else there
        self._stays = there if model.updates.in_backward else home
        begins = home if model.begins is None else model.begins
        self._pending = frozenset[int]() if model.accumulates else begins & model.updates.pending
        self._held = begins | home if model.accumulates else begins - self._pending if model.begins else frozenset()
        self._gradients = sum(model.gradient_bytes[j] for j in self._pending | self._held)
        #: Gradients that are being stored. With updates in backward the engine waits for them one shard later.
        self._draining: deque[int] = deque(maxlen=2 if model.updates.in_backward else 1)
        casts = sum(model.cast_bytes.get(j, 0) for j in in_memory)
        self._constant = {
            "homes": model.home_bytes + sum(model.resting_bytes[j] for j in in_memory),
            # With those of a shard that streams, or of gradients in their type.
            "casts": casts + max(model.cast_bytes.values(), default=0),
            "update buffers": model.buffer_bytes if len(in_memory) < count else 0,
            "transfer buffers": model.transfer_bytes,
        }
        self._fixed = sum(self._constant.values())
        sizes = tuple(model.slot_bytes)
        self._weights = slots_in_use(sizes, choice.slots, in_memory=in_memory, apart=model.own_slots)
        self._outside = outside.begins
        self._graphs = self._output = 0
        #: Boundaries that a cell is about to read; those that wait for backward; and their gradients.
        self._next, self._saved, self._coming = 0, 0, 0
        enters = [cell.enters for cells in model.cells for cell in cells]
        self._largest = max(enters, default=0)
        bounded = model.spills and choice.boundary_bytes < math.inf
        self._room = max(0, int(choice.boundary_bytes) - MOVING * self._largest) if bounded else sum(enters)
        self.peak = StepBytes()
        self._count(self._weights[0][0])
        self.peak.begin = self.peak.memory
        self._outside += outside.activations

    def forward(self) -> None:
        """Counts the forward."""
        model, kept = self._model, self._choice.kept
        for j, cells in enumerate(model.cells):
            weights = self._weights[0][j]
            if j in self._pending:  # a shard computes when its update is done, which frees the gradients
                self._gradients -= model.gradient_bytes[j]
            following = model.cells[j + 1] if j + 1 < model.shards else None
            for i, cell in enumerate(cells):
                new = following[i].enters if following is not None else 0
                keeps = (j, i) in kept
                self._count(weights, cell.graph if keeps else cell.saved, new)
                if j:
                    self._next -= cell.enters
                self._next += new
                if keeps:
                    self._graphs += cell.graph
                elif j >= model.first:
                    self._graphs += cell.selected
                    self._saved += cell.enters
        self.peak.spilled = max(0, self._saved - self._room)

    def backward(self) -> None:
        """Counts the backward."""
        model, kept, rows = self._model, self._choice.kept, range(len(self._model.rows))
        # The user has it until backward is over, and autograd its gradient.
        self._output = 2 * sum(model.boundaries(model.shards, rows) for rows in model.rows)
        made: set[int] = set()
        self._code_before(model.shards, made)
        for j in range(model.shards - 1, model.first - 1, -1):
            weights = self._weights[1][j]
            for i in reversed(rows):
                cell = model.cells[j][i]
                if (j, i) in kept:
                    self._graphs -= cell.graph
                    inside, read = cell.kept_backward, 0
                else:
                    self._graphs -= cell.selected  # from now on they are a part of its graph
                    inside, read = cell.backward, cell.enters
                self._count(weights, inside, cell.gradient)
                self._saved -= read
                self._coming += cell.gradient
                if j + 1 < model.shards:
                    self._coming -= model.cells[j + 1][i].gradient
                self._code_before(j, made)
            self._drain(j)
        self._count(self._weights[1][model.first], model.outside.reducing)  # the update of what is in no shard

    def _code_before(self, j: int, made: set[int]) -> None:
        """Counts the code before shard ``j``: its gradients are added to those of earlier micro-batches."""
        outside = self._model.outside
        rise = outside.rise(j, several=len(self._model.rows) > 1)
        if not rise:
            return
        new = outside.made_before.get(j, 0)
        if j not in made:
            made.add(j)
            self._outside += new
        own = self._model.gradient_bytes[j] if j < self._model.shards else 0
        self._count(self._weights[1][min(j, self._model.shards - 1)], own + rise - new)

    def _drain(self, j: int) -> None:
        model = self._model
        self._outside += model.outside.made_in.get(j, 0)
        if j in self._stays and j not in self._held:
            self._gradients += model.gradient_bytes[j]
        else:  # the engine waits for the previous shard's gradients only when these are complete
            self._draining.append((model.draining_bytes or model.gradient_bytes)[j])

    def _boundaries(self) -> int:
        """Boundaries and their gradients: those that stay, those being written, those that are read next."""
        there = self._saved
        if there > self._room:
            there = min(there, max(self._room, self._largest) + WRITES_IN_FLIGHT * self._largest)
        return self._next + self._coming + there

    def _count(self, weights: int, inside: int = 0, moving: int = 0) -> None:
        """Counts a cell, or code between cells: what it takes ``inside``, and boundaries and gradients beside it."""
        boundaries, gradients = self._boundaries() + moving, self._gradients + sum(self._draining)
        now = self._fixed + weights + gradients + boundaries + self._graphs + inside + self._output + self._outside
        if now > self.peak.memory:
            self.peak.memory = now
            self.peak.uses = self._constant | {
                "slots": weights,
                "gradients": gradients,
                "boundaries": boundaries,
                "graphs": self._graphs,
                "running cell": inside,
                "outside": self._outside,
                "output": self._output,
            }
