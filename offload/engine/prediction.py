"""Predicts a training step from what a model has measured, and measures the activations of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Executor
from offload.engine.measured import step_model
from offload.planning.estimate import Estimate
from offload.planning.plan import Kind, Plan
from offload.planning.search import predict_plan
from offload.storage import Tier
from offload.telemetry.statistics import Meter
from pipe.recompute.rerun import trial

__all__ = ["measured_activations", "predict_step"]


def measured_activations(executor: Executor, call: Any, output_fn: OutputFn | None) -> int:
    """Largest bytes that autograd saves in one shard for a chunk (args, kwargs); 0 if no parameter takes a gradient.

    Runs a trial forward, which leaves buffers and generators unchanged.
    """
    with torch.enable_grad(), trial([runner.layers for runner in executor.runners], [executor.device]):
        tape = executor.tape([call], [output_fn])
        tape.graphs = frozenset()  # a cell that keeps its graph is not measured
        executor.forward(tape, [call])
        first = tape.first if tape.records else len(executor.runners)
        tape.close()
    return max((runner.activation_bytes for runner in executor.runners[first:]), default=0)


def predict_step(plan: Plan, rows: Sequence[int], executor: Executor, *, meter: Meter, tier: Tier) -> Estimate:
    """Predicts a plan for micro-batches of so many ``rows``."""
    if not meter.bytes_loaded or not all(
        meter.backward_seconds_per_row(shard.index) for shard in executor.shards if shard.trainable
    ):
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    model = step_model(executor.shards, executor.steps, rows, meter=meter, tier=tier, device=executor.device)
    forecast, peak = predict_plan(model, plan)
    own = [s for shard in executor.shards for s in shard.own]
    weights, staging = sum(s.nbytes for s in own), tier.staging_bytes + executor.steps.reserved_bytes
    gradients = sum(s.nbytes for s in own if s.parameter.requires_grad)
    loads = [sum(s.nbytes for s in shard.at_home) for shard in executor.shards]
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(loads[j] for j in plan.loads),
        bytes_stored=sum(model.sizes.gradient_bytes[a.shard] for a in plan.actions if a.kind is Kind.DRAIN),
        peak_bytes={
            "device": peak.device_bytes,
            tier.name: weights + gradients + peak.spilled_bytes,
            "staging": staging,
        },
        activation_bytes=peak.activation_bytes,
        memory_bytes=peak.memory_bytes,
    )
