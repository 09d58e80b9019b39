"""Runs the forward of all micro-batches over all stages, and adds autograd edges that order the backward.

Cells (micro-batch i on stage j) run clock by clock; autograd runs them backward in the reverse order. For a
checkpointed cell (i, j) whose input is copied from another device and whose output is copied to one, the graph is::

              │ from (i, j-1)
          ╭───┴────╮
          │  Copy  │   on the copy streams                                           fence
          ╰───┬────╯
     ─ ─ ─ ─ ─│─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
          ╭───┴────╮
          │  Wait  │   the compute stream waits for the copy                         compute
          ╰───┬────╯
        ╭─────┴────╮
     ╭──│  layers  │ if they are checkpointed, only their input is kept
     │  ╰─────┬────╯
     │  ╭─────┴────╮
     │  │Checkpoint│
     │  ╰─────┬────╯
     │    ╭───┴────╮
     │    │  Wait  │   forward: the copy stream waits for the output; backward: the compute stream for the gradient
     │    ╰───┬────╯
     │  ╭─────┴────╮
     │  │Recompute │   in backward it runs while the gradient is being copied
     │  ╰─────┬────╯
     │        │ to (i, j+1)
     ╰─▶ Fork of (i-1, j): the backward of this micro-batch precedes that of the previous one

Invariants
    * On each stage, the backward of micro-batch i ends before that of micro-batch i-1 begins, so the recomputed
      activations of one cell are alive there.
    * A skip tensor is copied once, directly to the device of the stage that pops it.
    * Between stages on one device there are no copies and no waits.
    * Stages that take turns at one place take them in the reverse order in backward.

After an exception the micro-batches and their graph are dropped; the layers are unchanged except for buffers that
finished cells wrote.

Source: torchgpipe (Kim et al., 2020), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipe.checkpoint import Checkpointing
from pipe.copy import Copy, Wait
from pipe.dependency import fork, join
from pipe.microbatch import Batch
from pipe.refusals import refuse_holders
from pipe.schedule import StageAction, clock_cycles, coming_turns, forward_clocks
from pipe.skip.namespace import Key
from pipe.stage import Stage
from pipe.stream import AbstractStream, current_stream, use_device
from pipe.torch_private.autograd import in_backward
from pipe.worker import Task, task_runner

__all__ = ["Pipeline", "clock_cycles", "copy", "wait"]


def copy(batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream) -> None:
    """Copies the tensors of a batch to the device of ``next_stream``, in place of the old ones."""
    batch[:] = Copy.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]


def wait(batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream) -> None:
    """Makes ``next_stream`` wait for ``prev_stream`` before it reads the batch, and the reverse in backward."""
    batch[:] = Wait.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]


def _anchor(batch: Batch) -> int | None:
    """The index of the first tensor that needs a gradient: a Fork or Join of another would not be in the graph."""
    return next((k for k, tensor in enumerate(batch) if tensor.requires_grad), None)


def _fork(batch: Batch) -> Tensor | None:
    """A phony that depends on the batch, if any of its tensors needs a gradient."""
    k = _anchor(batch)
    if k is None:
        return None
    batch[k], phony = fork(batch[k])
    return phony


def _join(batch: Batch, phony: Tensor | None) -> None:
    k = _anchor(batch)
    if k is not None and phony is not None:
        batch[k] = join(batch[k], phony)


class Pipeline:
    """One forward of all micro-batches over all stages.

    Args:
        batches: the micro-batches; :meth:`run` replaces their values by the outputs.
        stages: the stages, in order.
        copy_streams: for each stage, a stream for each micro-batch.
        places: for each stage, the place where it takes turns (:mod:`pipe.turn`); by default each has its own.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        in_order: whether the cells of a clock run one after another, whatever their devices.
        record: called with each action when it begins, those of backward included.
    """

    def __init__(
        self,
        batches: list[Batch],
        stages: Sequence[Stage],
        copy_streams: Sequence[Sequence[AbstractStream]],
        *,
        places: Sequence[Hashable] | None = None,
        checkpoint_stop: int = 0,
        in_order: bool = False,
        record: Callable[[StageAction], None] | None = None,
    ) -> None:
        self.batches = batches
        self.stages = stages
        self.copy_streams = copy_streams
        self.checkpoint_stop = checkpoint_stop if torch.is_grad_enabled() else 0
        self.in_order = in_order
        self.record = record
        self._streams = [current_stream(stage.device) for stage in stages]
        self._skips: list[dict[Key, Batch]] = [{} for _ in batches]
        self._places = tuple(range(len(stages)) if places is None else places)
        self._clocks = forward_clocks(len(batches), self._places)
        #: For the first cell of each turn, the stage that has the next turn at its place.
        self._coming: dict[tuple[int, int], Stage] = {}
        #: For each stage, the first cell of the next turn at its place; for that cell, a phony of the cells whose
        #: backward must follow its own.
        self._next_turn: dict[int, tuple[int, int]] = {}
        self._turn_phonies: dict[tuple[int, int], Tensor] = {}
        if len(set(self._places)) < len(stages):
            numbers = [self._places.index(place) for place in self._places]
            for first, following in coming_turns(self._clocks, numbers).items():
                self._coming[first.micro_batch, first.stage] = stages[following.stage]
                self._next_turn[first.stage] = (following.micro_batch, following.stage)

    def run(self) -> None:
        """Runs all cells."""
        with task_runner([stage.device for stage in self.stages], in_order=self.in_order) as run:
            for actions in self._clocks:
                cells = [(action.micro_batch, action.stage) for action in actions]
                phonies = self._fence(cells)
                tasks = [(j, self._task(i, j, phony)) for (i, j), phony in zip(cells, phonies, strict=True)]
                outputs = run(tasks)
                for (i, j), (_, task), output in zip(cells, tasks, outputs, strict=True):
                    self._finish(i, j, task, output)
                # Without this, the tasks keep inputs alive while the next clock runs.
                del tasks, outputs

    def _fence(self, cells: list[tuple[int, int]]) -> list[Tensor | None]:
        """Orders and copies the inputs of the cells of a clock, before any of them computes."""
        phonies: list[Tensor | None] = []
        for i, j in cells:
            # batches[i - 1] is still the output of stage j here: it is copied to the next stage later in this loop.
            phonies.append(_fork(self.batches[i - 1]) if i > 0 else self._turn_phonies.pop((i, j), None))
            stage, target = self.stages[j], self.copy_streams[j][i]
            if j > 0 and self.stages[j - 1].device != stage.device:
                copy(self.batches[i], self.copy_streams[j - 1][i], target)
            for route in stage.arriving:
                if self.stages[route.stashed_at].device != stage.device:
                    copy(self._skips[i][route.key], self.copy_streams[route.stashed_at][i], target)
        return phonies

    def _task(self, i: int, j: int, phony: Tensor | None) -> Task:
        stage, compute_stream = self.stages[j], self._streams[j]
        if j > 0 and self.stages[j - 1].device != stage.device:
            # Without this, the layers read the boundary before its copy is complete.
            wait(self.batches[i], self.copy_streams[j][i], compute_stream)
        popped = []
        for route in stage.arriving:
            skip = self._skips[i].pop(route.key)
            if self.stages[route.stashed_at].device != stage.device:
                wait(skip, self.copy_streams[j][i], compute_stream)
            popped.append(skip.value)
        batch = Batch((self.batches[i].value, popped))
        function = partial(_recorded, stage, self.record, StageAction("F", j, i)) if self.record else stage
        after = self._coming.get((i, j))
        # Without an input that needs a gradient, no Join can order the backward of this cell. Autograd orders ready
        # nodes by sequence number, highest first. But each thread counts for itself; without inline, the nodes of a new
        # worker thread would have low numbers and run after the backward of the previous micro-batch.
        inline = _anchor(batch) is None
        _join(batch, phony)
        if i < self.checkpoint_stop:
            halves = Checkpointing(function, batch, module=stage.layers)
            compute = _then(halves.checkpoint, after)
            return Task(compute_stream, compute=compute, finalize=halves.recompute, inline=inline)
        return Task(compute_stream, compute=_then(partial(batch.call, function), after), finalize=None, inline=inline)

    def _finish(self, i: int, j: int, task: Task, output: Batch) -> None:
        """Handles a cell's output: adds waits for tensors that leave the device, then the Recompute half."""
        stage, leaving = self.stages[j], self.copy_streams[j][i]
        value, stashed = output.value
        coming = self.stages[j + 1].device if j < len(self.stages) - 1 else stage.device
        refuse_holders(j, value, stashed, checkpointed=i < self.checkpoint_stop, copied=coming != stage.device)
        main, skips = Batch(value), [Batch(tensor) for tensor in stashed]
        # Without these waits, the copy reads the output before it is computed; and in backward, the layers read the
        # gradient before it is copied.
        if coming != stage.device:
            wait(main, self._streams[j], leaving)
        for route, skip in zip(stage.leaving, skips, strict=True):
            if self.stages[route.popped_at].device != stage.device:
                wait(skip, self._streams[j], leaving)
        output.value = (main.value, [skip.value for skip in skips])
        with use_device(stage.device):
            task.finalize(output)
        if self.record is not None:
            _mark(output, self.record, StageAction("B", j, i))
        value, stashed = output.value
        self.batches[i] = Batch(value)
        if j in self._next_turn:
            # Without this, backward may switch to and fro between the stages of a place. All micro-batches are ordered
            # after the next turn, not only the last: one whose input needs no gradient does not order the one before.
            phony, following = _fork(self.batches[i]), self._next_turn[j]
            if phony is not None:
                held = self._turn_phonies.get(following)
                self._turn_phonies[following] = phony if held is None else join(held, phony)
        self._skips[i].update((route.key, Batch(skip)) for route, skip in zip(stage.leaving, stashed, strict=True))


def _then(compute: Callable[[], Batch], coming: Stage | None) -> Callable[[], Batch]:
    """``compute``, followed by ``prefetch()`` of the stage that has the next turn, which starts to load it."""
    if coming is None:
        return compute

    def run() -> Batch:
        batch = compute()
        coming.prefetch()
        return batch

    return run


def _recorded(stage: Stage, record: Callable[[StageAction], None], action: StageAction, input: Any) -> Any:
    if not in_backward():
        record(action)
    return stage(input)


class _Mark(torch.autograd.Function):
    """Records when gradients enter a cell. A separate node, since an output may be an input returned unchanged."""

    @staticmethod
    def forward(
        ctx: Any, record: Callable[[StageAction], None], action: StageAction, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.record, ctx.action = record, action
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.record(ctx.action)
        return (None, None, *gradients)


def _mark(output: Batch, record: Callable[[StageAction], None], action: StageAction) -> None:
    where = [k for k, tensor in enumerate(output) if tensor.requires_grad]
    marked = _Mark.apply(record, action, *(output[k] for k in where))  # type: ignore[no-untyped-call]
    for k, tensor in zip(where, marked or (), strict=True):
        output[k] = tensor
