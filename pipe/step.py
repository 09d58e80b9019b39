"""A whole training step, cell by cell in the order of a schedule.

Through autograd a batch goes forward as a whole before any of it goes back. A schedule such as 1F1B mixes the two, so
here each cell is a graph of its own: its inputs are leaves, and a gradient goes from a leaf to the cell that produced
its value when the schedule says so.

Invariants
    * The actions run in the order of the schedule's clocks, and the trace says so.
    * Gradients accumulate to those of the loss of the whole batch: with a mean, a micro-batch weighs its share of rows.
    * A cell's graph goes as soon as it went back.
    * After an exception every parameter has the gradient that it had before the step; but gradients of a stage that
      takes turns accumulate where they rest, so there what had arrived stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipe.checkpoint import Checkpointing
from pipe.guard import Watched
from pipe.microbatch import Batch, rows_of, split_nested
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.schedule import Action, Schedule, coming_turns
from pipe.skip.namespace import Key
from pipe.stage import Stage
from pipe.stream import current_stream
from pipe.worker import Task, task_runner

__all__ = ["Step", "parameters_of", "reduction_of", "restored_gradients", "split_target"]


@dataclass
class _Cell:
    """A cell between forward and backward."""

    outputs: list[Tensor] = field(default_factory=list)
    """The outputs that need a gradient; the loss alone, on the last stage."""
    gradients: list[Tensor | None] = field(default_factory=list)
    """For each output, what has come back for it."""
    sources: list[tuple[Tensor, _Cell, int]] = field(default_factory=list)
    """For each input that needs a gradient: its leaf, the cell that made it, and which of its outputs it is."""


@dataclass
class _InFlight:
    """A value on its way to another cell."""

    value: Any
    cell: _Cell
    index: dict[int, int]
    """Position of a leaf of ``value`` -> which output of ``cell`` it is, for those that need a gradient."""


class Step:
    """One step over all micro-batches.

    Args:
        stages: the stages, in order.
        schedule: a valid schedule for them.
        inputs: the micro-batches.
        targets: for each micro-batch, what the loss compares with.
        loss_fn: ``loss_fn(output, target)``, a tensor of one element.
        weights: for each micro-batch, the weight of its loss.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        record: called with each action when it begins.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        loss_fn: Callable[[Any, Any], Tensor],
        weights: Sequence[float],
        *,
        checkpoint_stop: int = 0,
        record: Callable[[Action], None],
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.targets = targets
        self.loss_fn = loss_fn
        self.weights = weights
        self.checkpoint_stop = checkpoint_stop
        self.record = record
        # The user's input is the output of a cell that never goes back; its gradients are delivered at the end.
        self._origins = [_Cell() for _ in inputs]
        self._values = [self._depart(x, cell) for x, cell in zip(inputs, self._origins, strict=True)]
        self._skips: list[dict[Key, _InFlight]] = [{} for _ in inputs]
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._watched: dict[int, Watched] = {}
        self._losses: dict[int, Tensor] = {}
        self._coming = coming_turns(schedule.clocks(), schedule.lines_of_stages)

    def run(self) -> Tensor:
        """Runs the step; returns the loss of the batch, detached."""
        streams = [current_stream(stage.device) for stage in self.stages]
        with task_runner([stage.device for stage in self.stages]) as run, torch.enable_grad():
            for actions in self.schedule.clocks():
                tasks = []
                for action in actions:
                    compute = partial(self._act, action)
                    tasks.append((action.stage, Task(streams[action.stage], compute=compute, finalize=None)))
                run(tasks)
        self._finish_inputs()
        return torch.stack([loss for _, loss in sorted(self._losses.items())]).sum()

    def _act(self, action: Action) -> Batch:
        self.record(action)
        work = self._forward if action.kind == "F" else self._backward
        batch = work(action.stage, action.micro_batch)
        coming = self._coming.get(action)
        if coming is not None:
            self.stages[coming.stage].expect(backward=coming.kind == "B")
        return batch

    @staticmethod
    def _depart(value: Any, cell: _Cell) -> _InFlight:
        """Notes which leaves of a cell's output need a gradient, and lets go of their graph."""
        leaves, spec = flatten(value)
        index: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                index[position] = len(cell.outputs)
                cell.outputs.append(leaf)
                cell.gradients.append(None)
                leaves[position] = leaf.detach()
        return _InFlight(unflatten(leaves, spec), cell, index)

    def _arrive(self, flying: _InFlight, cell: _Cell, device: torch.device) -> Any:
        """The value on the device of the cell that takes it, with leaves where a gradient is needed."""
        leaves, spec = flatten(map_tensors(lambda t: t.to(device, non_blocking=device.type != "cpu"), flying.value))
        for position, k in flying.index.items():
            leaf = leaves[position].detach().requires_grad_()
            cell.sources.append((leaf, flying.cell, k))
            leaves[position] = leaf
        return unflatten(leaves, spec)

    def _forward(self, j: int, i: int) -> Batch:
        stage = self.stages[j]
        cell = self._cells[j, i] = _Cell()
        value = self._arrive(self._values[i], cell, stage.device)
        self._values[i] = _InFlight(None, cell, {})
        popped = [self._arrive(self._skips[i].pop(route.key), cell, stage.device) for route in stage.arriving]
        batch = Batch((value, popped))
        # A cell that goes back at once would be recomputed at once: checkpointing would only cost time.
        if i < self.checkpoint_stop and not self.schedule.follows_at_once(j, i):
            if j not in self._watched:
                self._watched[j] = stage.watched()
            # Without its Recompute half: here the gradient is there when the cell goes back.
            value, stashed = Checkpointing(stage, batch, watched=self._watched[j]).checkpoint().value
        else:
            value, stashed = batch.call(stage).value
        for route, skip in zip(stage.leaving, stashed, strict=True):
            self._skips[i][route.key] = self._depart(skip, cell)
        if j < len(self.stages) - 1:
            self._values[i] = self._depart(value, cell)
        else:
            self._finish_output(i, value, cell)
        return batch

    def _finish_output(self, i: int, output: Any, cell: _Cell) -> None:
        loss = self.loss_fn(output, self.targets[i])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"expected loss_fn to return a tensor of one element, got {got}; reduce the loss")
        weighted = loss.reshape(()) * self.weights[i]
        if not weighted.requires_grad:
            raise ValueError("expected a loss that needs a gradient, got one that does not; is anything trainable?")
        self._losses[i] = weighted.detach()
        cell.outputs.append(weighted)
        cell.gradients.append(None)

    def _backward(self, j: int, i: int) -> Batch:
        cell = self._cells.pop((j, i))
        last = j == len(self.stages) - 1
        pairs = [
            (output, gradient)
            for k, (output, gradient) in enumerate(zip(cell.outputs, cell.gradients, strict=True))
            if gradient is not None or (last and k == len(cell.outputs) - 1)
        ]
        cell.outputs, cell.gradients = [], []
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        for leaf, source, k in cell.sources:
            if leaf.grad is not None:
                source.gradients[k] = leaf.grad.to(source.outputs[k].device, non_blocking=leaf.is_cuda)
        cell.sources = []
        return Batch(None)

    def _finish_inputs(self) -> None:
        """Lets the gradients of the user's inputs go on to where these come from."""
        pairs = [
            (output, gradient)
            for cell in self._origins
            for output, gradient in zip(cell.outputs, cell.gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def reduction_of(loss_fn: Callable[..., Any], reduction: str | None) -> str:
    """How a loss reduces rows: as it says itself, or else by their mean.

    Raises:
        ValueError: if it is neither ``"mean"`` nor ``"sum"``.
    """
    found = reduction if reduction is not None else getattr(loss_fn, "reduction", "mean")
    if found not in ("mean", "sum"):
        raise ValueError(f"expected a loss that reduces rows by 'mean' or 'sum', got reduction={found!r}; reduce it")
    return str(found)


def split_target(target: Any, inputs: Sequence[Any], device: torch.device) -> list[Any]:
    """The target, moved to ``device`` and cut as the inputs were.

    Raises:
        ValueError: if it has another number of rows.
    """
    rows = sum(rows_of(value) for value in inputs)
    if tensors_in(target) and rows_of(target) != rows:
        raise ValueError(
            f"expected a target of {rows} rows as the input has, got {rows_of(target)}; pass one target for each row"
        )
    moved = map_tensors(lambda t: t.to(device, non_blocking=device.type != "cpu"), target)
    targets = split_nested(moved, len(inputs))
    return targets if len(targets) == len(inputs) else targets * len(inputs)


def parameters_of(module: nn.Module, *, without: Iterable[object]) -> list[nn.Parameter]:
    """The parameters of a module, but not those of some modules in it, which are not even looked at."""
    hidden = {id(other) for other in without}
    if not hidden:
        return list(module.parameters())
    found: dict[int, nn.Parameter] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is not None and id(inner) not in hidden:
            found.update((id(p), p) for p in inner._parameters.values() if p is not None)
            waiting.extend(inner._modules.values())
    return list(found.values())


@contextlib.contextmanager
def restored_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, gradients accumulate from nothing. At the end they are added to those of before; on an error, dropped."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    with torch.no_grad():
        for parameter, gradient in before:
            if gradient is None:
                continue
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient
