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
    * Where stages take turns (:mod:`pipe.turn`), each runs all micro-batches before the next stage begins, and backward
      in the reverse order.

After an exception the micro-batches and their graph are dropped; the layers are unchanged except for buffers that
finished cells wrote.

Source: torchgpipe (Kim et al., 2020), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from pipe.checkpoint import Checkpointing
from pipe.copy import Copy, Wait
from pipe.dependency import fork, join
from pipe.nested import flatten, map_together, tensors_in, unflatten
from pipe.refusals import refuse_holders
from pipe.schedule import StageAction, clock_cycles, forward_clocks
from pipe.stage import Stage, Values
from pipe.stream import AbstractStream, current_stream, use_device, use_stream
from pipe.worker import Task, task_runner

__all__ = ["Pipeline", "clock_cycles", "copy", "wait"]


def copy(value: Any, prev_stream: AbstractStream, next_stream: AbstractStream) -> Any:
    """The value with its tensors copied to the device of ``next_stream``."""
    return map_together(partial(Copy.apply, prev_stream, next_stream), value)


def wait(value: Any, prev_stream: AbstractStream, next_stream: AbstractStream) -> Any:
    """The value; ``next_stream`` waits for ``prev_stream`` before it reads it, and the reverse in backward."""
    return map_together(partial(Wait.apply, prev_stream, next_stream), value)


def _anchored(value: Any) -> int | None:
    """The leaf that orders backwards: the first that needs a gradient. A Fork of another would not be in the graph."""
    leaves = flatten(value)[0]
    return next((k for k, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad), None)


def _fork(value: Any) -> tuple[Any, Tensor | None]:
    """The value, and a phony that depends on it, if any of its tensors needs a gradient."""
    k = _anchored(value)
    if k is None:
        return value, None
    leaves, spec = flatten(value)
    leaves[k], phony = fork(leaves[k])
    return unflatten(leaves, spec), phony


def _join(value: Any, phony: Tensor) -> Any:
    k = _anchored(value)
    if k is None:
        return value
    leaves, spec = flatten(value)
    leaves[k] = join(leaves[k], phony)
    return unflatten(leaves, spec)


class Pipeline:
    """One forward of all micro-batches over all stages.

    Args:
        values: for each micro-batch, what is on its way to later cells: at first the micro-batch itself, under None,
            which :meth:`run` replaces by the output.
        stages: the stages, in order.
        copy_streams: for each stage, a stream for each micro-batch.
        turns: number of places where stages take turns (:mod:`pipe.turn`); 0 if each stage has its own.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        in_order: whether the cells of a clock run one after another, whatever their devices.
        record: called with each action when it begins, those of backward included.
    """

    def __init__(
        self,
        values: list[Values],
        stages: Sequence[Stage],
        copy_streams: Sequence[Sequence[AbstractStream]],
        *,
        turns: int = 0,
        checkpoint_stop: int = 0,
        in_order: bool = False,
        record: Callable[[StageAction], None] | None = None,
    ) -> None:
        self.values = values
        self.stages = stages
        self.copy_streams = copy_streams
        self.turns = turns
        self.checkpoint_stop = checkpoint_stop if torch.is_grad_enabled() else 0
        self.in_order = in_order
        self.record = record
        self._streams = [current_stream(stage.device) for stage in stages]

    def run(self) -> None:
        """Runs all cells."""
        with task_runner([stage.device for stage in self.stages], in_order=self.in_order) as run:
            for actions in forward_clocks(len(self.values), len(self.stages), self.turns > 0):
                cells = [(action.micro_batch, action.stage) for action in actions]
                fences = [self._fence(i, j) for i, j in cells]
                made = [self._task(i, j, phonies) for (i, j), phonies in zip(cells, fences, strict=True)]
                outputs = run([task for task, _ in made])
                for (i, j), (_, halves), output in zip(cells, made, outputs, strict=True):
                    self._finish(i, j, halves, output)
                # Without this, the tasks keep inputs alive while the next clock runs.
                del made, outputs, output

    def _fence(self, i: int, j: int) -> list[Tensor]:
        """Orders and copies the input of a cell, before any cell of its clock computes."""
        stage, values = self.stages[j], self.values[i]
        # The values of these micro-batches are still outputs of this stage (they are copied to the next one later in
        # this clock) or, where stages take turns, of the stage that has had the turn before. All of these are ordered,
        # not only the last: one whose input needs no gradient does not order the one before it.
        before = [i - 1] if i > 0 else range(1, len(self.values)) if self.turns and j > 0 else ()
        phonies = []
        for k in before:
            self.values[k][None], phony = _fork(self.values[k][None])
            phonies += [] if phony is None else [phony]
        for route in stage.arriving:
            if self.stages[route.stashed_at].device != stage.device:
                streams = self.copy_streams[route.stashed_at][i], self.copy_streams[j][i]
                values[route.key] = copy(values[route.key], *streams)
        return phonies

    def _task(self, i: int, j: int, phonies: list[Tensor]) -> tuple[Task, Checkpointing | None]:
        stage, compute_stream = self.stages[j], self._streams[j]
        inputs = []
        for route in stage.arriving:
            value = self.values[i].pop(route.key)
            if self.stages[route.stashed_at].device != stage.device:
                # Without this, the layers read the boundary before its copy is complete.
                value = wait(value, self.copy_streams[j][i], compute_stream)
            inputs.append(value)
        # Without an input that needs a gradient, no Join can order the backward of this cell. Autograd orders ready
        # nodes by sequence number, highest first. But each thread counts for itself; without inline, the nodes of a new
        # worker thread would have low numbers and run after the backward of the previous micro-batch.
        inline = _anchored(inputs) is None
        for phony in phonies:
            inputs = _join(inputs, phony)
        halves = Checkpointing(stage, inputs, module=stage.layers) if i < self.checkpoint_stop else None
        run = partial(stage, inputs) if halves is None else halves.checkpoint
        return Task(j, partial(self._compute, i, j, run), compute_stream, inline), halves

    def _compute(self, i: int, j: int, run: Callable[[], list[Any]]) -> list[Any]:
        if self.record is not None:
            self.record(StageAction("F", j, i))
        outputs = run()
        if self.turns and i == 0 and j + self.turns < len(self.stages):
            self.stages[j + self.turns].prefetch()
        return outputs

    def _finish(self, i: int, j: int, halves: Checkpointing | None, outputs: list[Any]) -> None:
        """Handles a cell's outputs: adds waits for tensors that leave the device, then the Recompute half."""
        stage = self.stages[j]
        leaves = [self.stages[route.popped_at].device != stage.device for route in stage.leaving]
        for k, (output, copied) in enumerate(zip(outputs, leaves, strict=True)):
            refuse_holders(j, output, checkpointed=halves is not None, copied=copied)
            # Without this wait, the copy reads the output before it is computed; and in backward, the layers read the
            # gradient before it is copied.
            if copied:
                outputs[k] = wait(output, self._streams[j], self.copy_streams[j][i])
        if halves is not None:
            with use_device(stage.device), use_stream(self._streams[j]):
                outputs = halves.recompute(outputs)
        if self.record is not None:
            record = partial(self.record, StageAction("B", j, i))
            register_multi_grad_hook(
                [x for x in tensors_in(outputs) if x.requires_grad], lambda _: record(), mode="any"
            )
        self.values[i].update((route.key, output) for route, output in zip(stage.leaving, outputs, strict=True))
