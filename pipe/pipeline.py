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
from typing import Any, cast

import torch
from torch import Tensor

from pipe.checkpoint import Checkpointing
from pipe.copy import Copy, Wait
from pipe.dependency import fork, join
from pipe.nested import flatten, map_together, requires_grad, unflatten
from pipe.refusals import refuse_holders
from pipe.schedule import StageAction, clock_cycles, coming_turns, forward_clocks
from pipe.skip.namespace import Key
from pipe.stage import Stage
from pipe.stream import AbstractStream, current_stream, use_device, use_stream
from pipe.torch_private.autograd import in_backward
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


def _join(value: Any, phony: Tensor | None) -> Any:
    k = _anchored(value)
    if k is None or phony is None:
        return value
    leaves, spec = flatten(value)
    leaves[k] = join(leaves[k], phony)
    return unflatten(leaves, spec)


class Pipeline:
    """One forward of all micro-batches over all stages.

    Args:
        batches: the micro-batches; :meth:`run` replaces them by the outputs.
        stages: the stages, in order.
        copy_streams: for each stage, a stream for each micro-batch.
        places: for each stage, the place where it takes turns (:mod:`pipe.turn`); by default each has its own.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        in_order: whether the cells of a clock run one after another, whatever their devices.
        record: called with each action when it begins, those of backward included.
    """

    def __init__(
        self,
        batches: list[Any],
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
        self._skips: list[dict[Key, Any]] = [{} for _ in batches]
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
                made = [self._task(i, j, phony) for (i, j), phony in zip(cells, phonies, strict=True)]
                outputs = run([task for task, _ in made])
                for (i, j), (_, halves), output in zip(cells, made, outputs, strict=True):
                    self._finish(i, j, halves, *output)
                # Without this, the tasks keep inputs alive while the next clock runs.
                del made, outputs, output

    def _fence(self, cells: list[tuple[int, int]]) -> list[Tensor | None]:
        """Orders and copies the inputs of the cells of a clock, before any of them computes."""
        phonies: list[Tensor | None] = []
        for i, j in cells:
            # batches[i - 1] is still the output of stage j here: it is copied to the next stage later in this loop.
            if i > 0:
                self.batches[i - 1], phony = _fork(self.batches[i - 1])
            else:
                phony = self._turn_phonies.pop((i, j), None)
            phonies.append(phony)
            stage, target, skips = self.stages[j], self.copy_streams[j][i], self._skips[i]
            if j > 0 and self.stages[j - 1].device != stage.device:
                self.batches[i] = copy(self.batches[i], self.copy_streams[j - 1][i], target)
            for route in stage.arriving:
                if self.stages[route.stashed_at].device != stage.device:
                    skips[route.key] = copy(skips[route.key], self.copy_streams[route.stashed_at][i], target)
        return phonies

    def _task(self, i: int, j: int, phony: Tensor | None) -> tuple[Task, Checkpointing | None]:
        stage, compute_stream = self.stages[j], self._streams[j]
        if j > 0 and self.stages[j - 1].device != stage.device:
            # Without this, the layers read the boundary before its copy is complete.
            self.batches[i] = wait(self.batches[i], self.copy_streams[j][i], compute_stream)
        popped = []
        for route in stage.arriving:
            skip = self._skips[i].pop(route.key)
            if self.stages[route.stashed_at].device != stage.device:
                skip = wait(skip, self.copy_streams[j][i], compute_stream)
            popped.append(skip)
        input = self.batches[i], popped
        function = partial(_recorded, stage, self.record, StageAction("F", j, i)) if self.record else stage
        after = self._coming.get((i, j))
        # Without an input that needs a gradient, no Join can order the backward of this cell. Autograd orders ready
        # nodes by sequence number, highest first. But each thread counts for itself; without inline, the nodes of a new
        # worker thread would have low numbers and run after the backward of the previous micro-batch.
        inline = _anchored(input) is None
        input = _join(input, phony)
        halves, compute = None, cast("Callable[[], Any]", partial(function, input))
        if i < self.checkpoint_stop:
            halves = Checkpointing(function, input, module=stage.layers)
            compute = halves.checkpoint
        return Task(j, compute if after is None else partial(_then, compute, after), compute_stream, inline), halves

    def _finish(self, i: int, j: int, halves: Checkpointing | None, value: Any, stashed: list[Any]) -> None:
        """Handles a cell's output: adds waits for tensors that leave the device, then the Recompute half."""
        stage, leaving = self.stages[j], self.copy_streams[j][i]
        coming = self.stages[j + 1].device if j < len(self.stages) - 1 else stage.device
        refuse_holders(j, value, stashed, checkpointed=halves is not None, copied=coming != stage.device)
        # Without these waits, the copy reads the output before it is computed; and in backward, the layers read the
        # gradient before it is copied.
        if coming != stage.device:
            value = wait(value, self._streams[j], leaving)
        for k, route in enumerate(stage.leaving):
            if self.stages[route.popped_at].device != stage.device:
                stashed[k] = wait(stashed[k], self._streams[j], leaving)
        if halves is not None:
            with use_device(stage.device), use_stream(self._streams[j]):
                value, stashed = halves.recompute((value, stashed))
        if self.record is not None:
            mark = partial(_Mark.apply, self.record, StageAction("B", j, i))
            value, stashed = map_together(mark, (value, stashed), only=requires_grad)
        if j in self._next_turn:
            # Without this, backward may switch to and fro between the stages of a place. All micro-batches are ordered
            # after the next turn, not only the last: one whose input needs no gradient does not order the one before.
            value, phony = _fork(value)
            following = self._next_turn[j]
            if phony is not None:
                held = self._turn_phonies.get(following)
                self._turn_phonies[following] = phony if held is None else join(held, phony)
        self.batches[i] = value
        self._skips[i].update((route.key, skip) for route, skip in zip(stage.leaving, stashed, strict=True))


def _then(compute: Callable[[], Any], coming: Stage) -> Any:
    """What ``compute`` returns, after ``prefetch()`` of the stage that has the next turn, which starts to load it."""
    output = compute()
    coming.prefetch()
    return output


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
