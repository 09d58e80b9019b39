"""A forward for its measure: what autograd would keep of a chunk, and no trace in buffers or generators."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Executor
from pipe.recompute.rerun import trial

__all__ = ["measured_activations"]


def measured_activations(executor: Executor, call: Any, output_fn: OutputFn | None) -> int:
    """Bytes of the shard that keeps most of one chunk, (args, kwargs) of the first layer; 0 if nothing is trained."""
    with torch.enable_grad(), trial([replayable.layers for replayable in executor.replayables], [executor.device]):
        tape = executor.tape([call], [output_fn])
        tape.graphs = frozenset()  # a cell that keeps its graph is not measured
        executor.forward(tape, [call])
        first = tape.first if tape.records else len(executor.replayables)
        tape.close()
    return max((replayable.activation_bytes for replayable in executor.replayables[first:]), default=0)
