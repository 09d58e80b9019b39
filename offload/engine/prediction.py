"""Predicts a training step from what a model has measured, and measures the activations of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from offload.engine.cell import OutputFn
from offload.engine.executor import Executor
from offload.planning.estimate import Estimate
from offload.planning.peak_memory import StepBytes, peak_memory
from offload.planning.plan import Kind, Plan
from offload.planning.simulate import Costs, simulate
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
    shards, steps = executor.shards, executor.steps
    seen = all(meter.cell_seconds_per_row("B", shard.index) for shard in shards if shard.trainable)
    if not seen or not meter.bytes_loaded:
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    loads = [sum(s.nbytes for s in shard.at_home) for shard in shards]
    gradient_bytes = [sum(s.nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    each = {lane: meter.copy_seconds_per_byte(lane) for lane in ("load", "drain", "update", "boundary")}
    boundaries, mean_rows = steps.sizes(rows), sum(rows) / len(rows)
    own = [s for shard in shards for s in shard.own]
    on_host = executor.device.type == "cpu"
    costs = Costs(
        load=[nbytes * each["load"] for nbytes in loads],
        forward=[meter.cell_seconds_per_row("F", shard.index) * mean_rows for shard in shards],
        backward=[meter.cell_seconds_per_row("B", shard.index) * mean_rows for shard in shards],
        drain=[nbytes * each["drain"] for nbytes in gradient_bytes],
        update=[nbytes * each["update"] for nbytes in gradient_bytes],
        boundary=[boundaries((j, 0)) * each["boundary"] for j in range(len(shards) + 1)],
    )
    sizes = StepBytes(
        slot_bytes=max(shard.slot_bytes for shard in shards),
        gradient_bytes=gradient_bytes,
        # In host memory a home takes gradients as they are.
        gradients_stay=on_host and not tier.blocking_io,
        rows=rows,
        boundaries=boundaries,
        gradients=steps.sizes(rows, gradients=True),
        memory_profiles=meter.memory_profiles,
        profiles_with_boundary=meter.keeping,
    )
    weights, staging = sum(s.nbytes for s in own), tier.staging_bytes + steps.reserved_bytes
    gradients = sum(s.nbytes for s in own if s.parameter.requires_grad)
    forecast = simulate(plan, costs)
    peak = peak_memory(plan, replace(sizes, drained=forecast.drained))
    elsewhere = (staging if on_host else 0) + (weights if sizes.gradients_stay else 0)
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(loads[j] for j in plan.loads),
        bytes_stored=sum(gradient_bytes[a.shard] for a in plan.actions if a.kind is Kind.DRAIN),
        peak_bytes={
            "device": peak.device_bytes,
            tier.name: weights + gradients + peak.spilled_bytes,
            "staging": staging,
        },
        activation_bytes=peak.activation_bytes,
        memory_bytes=peak.memory_bytes + elsewhere,
    )
