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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipe.checkpoint import Checkpointing
from pipe.loss import MicroLoss
from pipe.microbatch import rows_of, split_nested
from pipe.nested import TreeSpec, flatten, tensors_in, unflatten
from pipe.refusals import refuse_holders
from pipe.schedule import Schedule, StageAction
from pipe.skip.namespace import Key
from pipe.stage import Stage
from pipe.stream import current_stream
from pipe.worker import Task, task_runner

__all__ = ["PipelineStep", "moved", "split_target", "step_of_one_cell"]


@dataclass
class _Cell:
    """A cell between forward and backward."""

    outputs: list[Tensor] = field(default_factory=list)
    """The outputs that need a gradient; the loss alone, on the last stage."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """For each output, its gradient once the consuming cell ran backward."""
    sources: list[tuple[Tensor, _Cell, int]] = field(default_factory=list)
    """For each input that needs a gradient: its leaf, the cell that produced it, and its index in that cell's outputs.
    """


@dataclass
class _Boundary:
    """The output of one cell that is the input of another, without its graph."""

    leaves: list[Any]
    spec: TreeSpec
    cell: _Cell
    index: dict[int, int]
    """Position of a leaf -> its index in the outputs of ``cell``, for leaves that need a gradient."""


_ONLY = StageAction("F", 0, 0), StageAction("B", 0, 0)


def step_of_one_cell(
    stage: Stage, input: Any, target: Any, loss: MicroLoss, record: Callable[[StageAction], None]
) -> Tensor:
    """Runs the step of one micro-batch on one stage, as the layers would run it; returns its loss, detached."""
    with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        record(_ONLY[0])
        total, count = loss.of(stage((input, ()))[0], target)
        total = total if count is None else (total / count).to(total.dtype)
        record(_ONLY[1])
        total.backward()
    return total.detach()


class PipelineStep:
    """One step over all micro-batches, with input, target and loss of each.

    Args:
        schedule: a valid schedule for the stages.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        in_order: whether the cells of a clock run one after another, whatever their devices.
        record: called with each action when it begins.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        losses: Sequence[MicroLoss],
        *,
        checkpoint_stop: int = 0,
        in_order: bool = False,
        record: Callable[[StageAction], None],
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.targets = targets
        self.losses = losses
        self.checkpoint_stop = checkpoint_stop
        self.in_order = in_order
        self.record = record
        # The user's input counts as the output of a cell without a backward; run() passes its gradients on at the end.
        self._origins = [_Cell() for _ in inputs]
        self._values = dict(enumerate(map(self._detach, inputs, self._origins)))
        self._skips: list[dict[Key, _Boundary]] = [{} for _ in inputs]
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._losses: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor | float] = {}

    def run(self) -> Tensor:
        """Runs the step; returns the loss of the batch, detached."""
        devices = [stage.device for stage in self.stages]
        streams = [current_stream(device) for device in devices]
        with task_runner(devices, in_order=self.in_order) as run, torch.enable_grad():
            for actions in self.schedule.clocks():
                run([Task(a.stage, partial(self._act, a), streams[a.stage]) for a in actions])
        losses = [loss for _, loss in sorted(self._losses.items())]
        total = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        if self._counts:
            total = (total / self._count()).to(total.dtype)
        self._finish_inputs()
        return total

    def _act(self, action: StageAction) -> None:
        self.record(action)
        work = self._forward if action.kind == "F" else self._backward
        work(action.stage, action.micro_batch)
        coming = self.schedule.coming.get(action) if self.schedule.coming else None
        if coming is not None:
            self.stages[coming.stage].prefetch(backward=coming.kind == "B")

    @staticmethod
    def _detach(value: Any, cell: _Cell) -> _Boundary:
        """Records which leaves of a cell's output need a gradient, and detaches them."""
        leaves, spec = flatten(value)
        index: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                index[position] = len(cell.outputs)
                cell.outputs.append(leaf)
                cell.gradients.append(None)
                leaves[position] = leaf.detach()
        return _Boundary(leaves, spec, cell, index)

    def _receive(self, boundary: _Boundary, cell: _Cell, device: torch.device) -> Any:
        """The value on the device of the consuming cell, with new autograd leaves where a gradient is needed."""
        leaves = [moved(x, device) if isinstance(x, Tensor) else x for x in boundary.leaves]
        for position, k in boundary.index.items():
            leaf = leaves[position].detach().requires_grad_()
            cell.sources.append((leaf, boundary.cell, k))
            leaves[position] = leaf
        return unflatten(leaves, boundary.spec)

    def _forward(self, j: int, i: int) -> None:
        stage = self.stages[j]
        cell = self._cells[j, i] = _Cell()
        value = self._receive(self._values.pop(i), cell, stage.device)
        popped = [self._receive(self._skips[i].pop(route.key), cell, stage.device) for route in stage.arriving]
        # A cell whose backward follows directly would be recomputed at once: checkpointing would only cost time.
        checkpointed = i < self.checkpoint_stop and not self.schedule.follows_at_once(j, i)
        if checkpointed:
            # Without its Recompute half: the gradient is already computed when this cell's backward begins.
            value, stashed = Checkpointing(stage, (value, popped), module=stage.layers).checkpoint()
        else:
            value, stashed = stage((value, popped))
        coming = self.stages[j + 1].device if j < len(self.stages) - 1 else stage.device
        refuse_holders(j, value, stashed, checkpointed=checkpointed, copied=coming != stage.device)
        for route, skip in zip(stage.leaving, stashed, strict=True):
            self._skips[i][route.key] = self._detach(skip, cell)
        if j < len(self.stages) - 1:
            self._values[i] = self._detach(value, cell)
        else:
            self._finish_output(i, value, cell)

    def _finish_output(self, i: int, output: Any, cell: _Cell) -> None:
        loss, count = self.losses[i].of(output, self.targets[i])
        self._losses[i] = loss.detach()
        if count is not None:
            self._counts[i] = count
        cell.outputs.append(loss)
        cell.gradients.append(None)

    def _count(self) -> Tensor:
        """The divisor of the loss of the batch."""
        assert len(self._counts) == len(self.losses), "read before the last loss was computed"
        device = self._losses[0].device
        counts = (torch.as_tensor(count).to(device) for count in self._counts.values())
        return sum(counts, torch.zeros((), device=device))

    def _backward(self, j: int, i: int) -> None:
        cell = self._cells.pop((j, i))
        last = j == len(self.stages) - 1
        pairs = [
            (output, gradient)
            for k, (output, gradient) in enumerate(zip(cell.outputs, cell.gradients, strict=True))
            if gradient is not None or (last and k == len(cell.outputs) - 1)
        ]
        cell.outputs, cell.gradients = [], []
        if last and self._counts:
            output, _ = pairs[-1]
            pairs[-1] = output, self._count().reciprocal().to(output)
        _run_backward(pairs)
        for leaf, source, k in cell.sources:
            if leaf.grad is not None:
                source.gradients[k] = leaf.grad.to(source.outputs[k].device, non_blocking=leaf.is_cuda)

    def _finish_inputs(self) -> None:
        """Runs backward from the gradients of the user's inputs into the graph that produced these inputs."""
        pairs = [
            (output, gradient)
            for cell in self._origins
            for output, gradient in zip(cell.outputs, cell.gradients, strict=True)
            if gradient is not None
        ]
        _run_backward(pairs)


def _run_backward(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the host does not wait for a copy there."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def split_target(target: Any, rows: Sequence[int]) -> list[Any]:
    """The target, split as the input was, into micro-batches of ``rows`` rows."""
    if len(rows) > 1 and tensors_in(target) and rows_of(target) != sum(rows):
        raise ValueError(
            f"expected a target of {sum(rows)} rows as the input has, got {rows_of(target)}; pass one target for each "
            f"row, or NoChunk(tensor) for one that all rows share"
        )
    targets = split_nested(target, len(rows))
    return targets if len(targets) == len(rows) else targets * len(rows)
