"""Runs forward and backward of a batch cell by cell, in the order of a pipeline schedule such as 1F1B.

With one autograd graph, the whole batch runs forward before any backward. 1F1B mixes the two, so each cell has a graph
of its own here: its inputs are leaves, and the schedule decides when the gradient of a leaf is passed to the cell that
produced its value.

Invariants
    * The actions run in the order of the schedule's clocks, and are recorded in that order.
    * Gradients accumulate to those of the loss of the whole batch (:mod:`pipe.loss`). Where a loss returns
      ``(sum, count)``, the schedule has all forwards before the first backward, which needs the last count.
    * A cell's graph is freed directly after its backward.
    * After an exception every parameter has the gradient that it had before the step; except that a stage that takes
      turns adds gradients to its own storage, and keeps those that were added before the exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from pipe.checkpoint import Checkpointing
from pipe.loss import MicroLoss
from pipe.microbatch import refuse_holder, rows_of, split_nested
from pipe.nested import map_tensors, tensors_in
from pipe.schedule import Clocks, StageAction
from pipe.stage import Stage, Values
from pipe.stream import to_device, use_device

__all__ = ["PipelineStep", "split_target", "step_of_one_cell"]

#: Stands for the cell that has made the input of a micro-batch.
_USER = -1


def step_of_one_cell(stage: Stage, input: Any, target: Any, loss: MicroLoss) -> Tensor:
    """Runs the step of one micro-batch on one stage, as the layers would run it; returns its loss, detached."""
    with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        total, count = loss.of(stage([input])[0], target)
        total = total if count is None else (total / count).to(total.dtype)
        total.backward()
    return total.detach()


@dataclass
class PipelineStep:
    """One step over all micro-batches, with input, target and loss of each.

    Attributes:
        clocks: the schedule for these stages and micro-batches.
        turns: number of places where stages take turns (:mod:`pipe.turn`); 0 if each stage has its own.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        trace: gets each action when it begins.
    """

    stages: Sequence[Stage]
    clocks: Clocks
    inputs: Sequence[Any]
    targets: Sequence[Any]
    losses: Sequence[MicroLoss]
    turns: int = 0
    checkpoint_stop: int = 0
    trace: list[StageAction] | None = None

    def __post_init__(self) -> None:
        last = [a for a in chain.from_iterable(self.clocks) if a.stage == len(self.stages) - 1]
        #: Micro-batches whose backward follows their forward on the last stage: a checkpoint would only cost time.
        self._at_once = {a.micro_batch for a, b in pairwise(last) if (a.kind, b.kind) == ("F", "B")}
        self._values: list[Values] = [{None: value} for value in self.inputs]
        #: For each cell between forward and backward, the leaves that stand for inputs, with the stage that made each.
        self._sources: dict[tuple[int, int], list[tuple[Tensor, Tensor, int]]] = {}
        #: For each cell, its outputs that have a gradient, and the gradients.
        self._gradients: dict[tuple[int, int], list[tuple[Tensor, Tensor | None]]] = {}
        self._losses: list[Tensor] = []
        self._counts: list[Tensor | float] = []

    def run(self) -> Tensor:
        """Runs the step; returns the loss of the batch, detached."""
        with torch.enable_grad():
            for action in chain.from_iterable(self.clocks):
                with use_device(self.stages[action.stage].device):
                    self._act(action)
        total = torch.stack(self._losses).sum()
        if self._counts:
            total = (total / self._count()).to(total.dtype)
        # Into the graph that produced the user's inputs, of all micro-batches together.
        _run_backward([pair for i in range(len(self.losses)) for pair in self._gradients.pop((_USER, i), ())])
        return total

    def _act(self, action: StageAction) -> None:
        if self.trace is not None:
            self.trace.append(action)
        kind, j, i = action
        (self._forward if kind == "F" else self._backward)(j, i)
        if not self.turns:
            return
        is_last = j + self.turns >= len(self.stages)  # at its place: the turn before it is the next one, in backward
        begins = i == 0 if kind == "F" else i == len(self.losses) - 1 and not is_last
        backward = kind == "B" or is_last
        coming = j - self.turns if backward else j + self.turns
        if begins and coming >= 0:
            self.stages[coming].prefetch(backward=backward)

    def _receive(self, value: Any, stage: Stage, source: int, sources: list[tuple[Tensor, Tensor, int]]) -> Any:
        """The value on the device of the consuming cell, with new autograd leaves where a gradient is needed."""

        def receive(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return to_device(tensor, stage.device)
            leaf = to_device(tensor.detach(), stage.device).requires_grad_()
            sources.append((leaf, tensor, source))
            return leaf

        return map_tensors(receive, value)

    def _forward(self, j: int, i: int) -> None:
        stage, values = self.stages[j], self._values[i]
        sources = self._sources[j, i] = []
        inputs = [
            self._receive(values.pop(route.key), stage, route.stashed_at if j else _USER, sources)
            for route in stage.arriving
        ]
        is_last = j == len(self.stages) - 1
        checkpointed = i < self.checkpoint_stop and not (is_last and i in self._at_once)
        # Without its Recompute half: the gradient is already computed when this cell's backward begins.
        outputs = Checkpointing(stage, inputs, module=stage.layers).checkpoint() if checkpointed else stage(inputs)
        for route, output in zip(stage.leaving, outputs, strict=True):
            copied = self.stages[route.popped_at].device != stage.device
            if checkpointed or copied:
                refuse_holder(f"the output of stage {j}", output, needs_grad=not copied)
            values[route.key] = output
        if is_last:
            loss, count = self.losses[i].of(values.pop(None), self.targets[i])
            self._losses.append(loss.detach())
            if count is not None:
                self._counts.append(count)
            self._gradients[j, i] = [(loss, None)]

    def _count(self) -> Tensor:
        """The divisor of the loss of the batch."""
        assert len(self._counts) == len(self.losses), "read before the last loss was computed"
        device = self._losses[0].device
        counts = (torch.as_tensor(count).to(device) for count in self._counts)
        return sum(counts, torch.zeros((), device=device))

    def _backward(self, j: int, i: int) -> None:
        pairs = self._gradients.pop((j, i), [])
        if j == len(self.stages) - 1 and self._counts:
            loss, _ = pairs[0]
            pairs[0] = loss, self._count().reciprocal().to(loss)
        _run_backward(pairs)
        for leaf, output, source in self._sources.pop((j, i)):
            if leaf.grad is not None:
                # The host waits for a copy to itself. Without that, it reads a gradient that is not there yet.
                gradient = to_device(leaf.grad, output.device)
                self._gradients.setdefault((source, i), []).append((output, gradient))


def _run_backward(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def split_target(target: Any, rows: Sequence[int], device: torch.device | None = None) -> list[Any]:
    """The target, split as the input was, into micro-batches of ``rows`` rows, on ``device``."""
    if len(rows) > 1 and tensors_in(target) and rows_of(target) != sum(rows):
        raise ValueError(
            f"expected a target of {sum(rows)} rows as the input has, got {rows_of(target)}; pass one target for each "
            f"row, or NoChunk(tensor) for one that all rows share"
        )
    targets = split_nested(target, len(rows), device)
    return targets if len(targets) == len(rows) else targets * len(rows)
