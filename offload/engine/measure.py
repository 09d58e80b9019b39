"""A forward for its measure: what autograd would keep of a chunk, and no trace in buffers or generators."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Walk
from pipe.recompute.module_state import Guard
from pipe.recompute.replay import Replay

__all__ = ["measured_activations"]


def measured_activations(walk: Walk, call: Any, output_fn: OutputFn | None) -> int:
    """Bytes of the shard that keeps most of one chunk, (args, kwargs) of the first layer; 0 if nothing is trained."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for runner in walk.runners:
            stack.enter_context(Guard(runner.watched, attributes=True).trial())
        generators = [generator for runner in walk.runners for generator in runner.watched.generators]
        stack.enter_context(Replay.capture([walk.device], generators).again())
        tape = walk.tape([call], [output_fn])
        tape.graphs = frozenset()  # a cell that keeps its graph is not measured
        walk.forward(tape, [call])
        first = tape.first if tape.records else len(walk.runners)
        tape.close()
    return max((runner.activation_bytes for runner in walk.runners[first:]), default=0)
