"""A forward for its measure: what autograd would keep of a chunk, and no trace in buffers or generators."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Executor
from pipe.recompute.module_state import ModuleState
from pipe.recompute.replay import Replay

__all__ = ["measured_activations"]


def measured_activations(executor: Executor, call: Any, output_fn: OutputFn | None) -> int:
    """Bytes of the shard that keeps most of one chunk, (args, kwargs) of the first layer; 0 if nothing is trained."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for replayable in executor.replayables:
            stack.enter_context(ModuleState(replayable.watched, attributes=True).trial())
        generators = [generator for replayable in executor.replayables for generator in replayable.watched.generators]
        stack.enter_context(Replay.capture([executor.device], generators).again())
        tape = executor.tape([call], [output_fn])
        tape.graphs = frozenset()  # a cell that keeps its graph is not measured
        executor.forward(tape, [call])
        first = tape.first if tape.records else len(executor.replayables)
        tape.close()
    return max((replayable.activation_bytes for replayable in executor.replayables[first:]), default=0)
