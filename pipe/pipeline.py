"""Runs the forward of all micro-batches over all stages; autograd runs the backward in the reverse order.

Cells (micro-batch i on stage j) run clock by clock, issued by one thread; devices compute at the same time, since the
host does not wait for them. For a checkpointed cell (i, j) whose input is copied from another device and whose output
is copied to one, the graph is::

           │ from (i, j-1)
       ╭───┴────╮
       │  Copy  │   on the copy streams
       ╰───┬────╯
       ╭───┴────╮
       │  Wait  │   the compute stream waits for the copy
       ╰───┬────╯
       ╭───┴────╮
       │ layers │   if they are checkpointed, only their input is kept
       ╰───┬────╯
     ╭─────┴────╮
     │Checkpoint│
     ╰─────┬────╯
       ╭───┴────╮
       │  Wait  │   forward: the copy stream waits for the output; backward: the compute stream for the gradient
       ╰───┬────╯
     ╭─────┴────╮
     │Recompute │   in backward it runs while the gradient is being copied
     ╰─────┬────╯
           │ to (i, j+1)

Autograd runs what is ready by the sequence numbers of the nodes, which one thread counts: the latest first. So each
stage runs its cells backward in the reverse order, micro-batch i to its end before micro-batch i-1 begins.

Invariants
    * The recomputed activations of one cell are alive on each stage.
    * A skip tensor is copied once, directly to the device of the stage that pops it.
    * Between stages on one device there are no copies and no waits.
    * Where stages take turns (:mod:`pipe.turn`), each runs all micro-batches before the next stage begins, and backward
      in the reverse order.
    * Layers draw random numbers in the order of the cells.

After an exception the micro-batches and their graph are dropped; the layers are unchanged except for buffers that
finished cells wrote.

Source: torchgpipe (Kim et al., 2020), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from pipe.checkpoint import Checkpointing
from pipe.copy import Copy, Wait
from pipe.microbatch import refuse_holder
from pipe.nested import map_together, tensors_in
from pipe.schedule import StageAction, clock_cycles, forward_clocks
from pipe.stage import Stage, Values
from pipe.stream import AbstractStream, copy_stream, current_stream, use_device, use_stream

__all__ = ["Pipeline", "clock_cycles", "copy", "wait"]


def copy(value: Any, prev_stream: AbstractStream, next_stream: AbstractStream) -> Any:
    """The value with its tensors copied to the device of ``next_stream``."""
    return map_together(partial(Copy.apply, prev_stream, next_stream), value)


def wait(value: Any, prev_stream: AbstractStream, next_stream: AbstractStream) -> Any:
    """The value; ``next_stream`` waits for ``prev_stream`` before it reads it, and the reverse in backward."""
    return map_together(partial(Wait.apply, prev_stream, next_stream), value)


@dataclass
class Pipeline:
    """One forward of all micro-batches over all stages.

    Attributes:
        values: for each micro-batch, what is on its way to later cells: at first the micro-batch itself, under None,
            which :meth:`run` replaces by the output.
        stages: the stages, in order.
        turns: number of places where stages take turns (:mod:`pipe.turn`); 0 if each stage has its own.
        checkpoint_stop: the micro-batches before this one are checkpointed.
        trace: gets each action when it begins, those of backward included.
    """

    values: list[Values]
    stages: Sequence[Stage]
    turns: int = 0
    checkpoint_stop: int = 0
    trace: list[StageAction] | None = None

    def run(self) -> None:
        """Runs all cells."""
        self._streams = [current_stream(stage.device) for stage in self.stages]
        for actions in forward_clocks(len(self.values), len(self.stages), self.turns > 0):
            # All copies of a clock are issued before its layers, so that they overlap.
            for _, j, i in actions:
                self._copy_inputs(i, j)
            for _, j, i in actions:
                with use_device(self.stages[j].device), use_stream(self._streams[j]):
                    self._run_cell(i, j)

    def _copy_inputs(self, i: int, j: int) -> None:
        stage, values = self.stages[j], self.values[i]
        for route in stage.arriving:
            device = self.stages[route.stashed_at].device
            if device != stage.device:
                streams = copy_stream(device, route.stashed_at, i), copy_stream(stage.device, j, i)
                values[route.key] = copy(values[route.key], *streams)

    def _run_cell(self, i: int, j: int) -> None:
        stage, compute_stream = self.stages[j], self._streams[j]
        copies = copy_stream(stage.device, j, i)
        if self.trace is not None:
            self.trace.append(StageAction("F", j, i))
        inputs = []
        for route in stage.arriving:
            value = self.values[i].pop(route.key)
            if self.stages[route.stashed_at].device != stage.device:
                # Without this, the layers read the boundary before its copy is complete.
                value = wait(value, copies, compute_stream)
            inputs.append(value)
        checkpointed = i < self.checkpoint_stop and torch.is_grad_enabled()
        halves = Checkpointing(stage, inputs, module=stage.layers) if checkpointed else None
        outputs = stage(inputs) if halves is None else halves.checkpoint()
        if self.turns and i == 0 and j + self.turns < len(self.stages):
            self.stages[j + self.turns].prefetch()
        for k, route in enumerate(stage.leaving):
            copied = self.stages[route.popped_at].device != stage.device
            if checkpointed or copied:
                refuse_holder(f"the output of stage {j}", outputs[k], needs_grad=not copied)
            # Without this wait, the copy reads the output before it is computed; and in backward, the layers read the
            # gradient before it is copied.
            if copied:
                outputs[k] = wait(outputs[k], compute_stream, copies)
        if halves is not None:
            outputs = halves.recompute(outputs)
        if self.trace is not None:
            record = partial(self.trace.append, StageAction("B", j, i))
            made = [x for x in tensors_in(outputs) if x.requires_grad]
            register_multi_grad_hook(made, lambda _: record(), mode="any")
        self.values[i].update((route.key, output) for route, output in zip(stage.leaving, outputs, strict=True))
