"""Measures the activations of a chunk with a trial forward that leaves buffers and generators unchanged."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Executor
from pipe.recompute.rerun import trial

__all__ = ["measured_activations"]


def measured_activations(executor: Executor, call: Any, output_fn: OutputFn | None) -> int:
    """Largest bytes that autograd saves in one shard for a chunk (args, kwargs); 0 if no parameter takes a gradient."""
    with torch.enable_grad(), trial([runner.layers for runner in executor.runners], [executor.device]):
        tape = executor.tape([call], [output_fn])
        tape.graphs = frozenset()  # a cell that keeps its graph is not measured
        executor.forward(tape, [call])
        first = tape.first if tape.records else len(executor.runners)
        tape.close()
    return max((runner.activation_bytes for runner in executor.runners[first:]), default=0)
