"""Predicts what a training step costs before it runs: seconds and bytes of its plan.

This module knows nothing of tensors or torch. :mod:`offload.engine.prediction` gives it what a model has measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.planning.peak_memory import StepBytes, peak_memory
from offload.planning.plan import Kind, Plan
from offload.planning.simulate import Costs, simulate

__all__ = ["Estimate", "HomeBytes", "estimate_step"]


@dataclass(frozen=True)
class Estimate:
    """Prediction for one step, forward and backward."""

    #: Seconds from the first load to the last gradient at home, without the user's loss; with the updates of an
    #: ``OffloadOptimizer``, without any other optimizer.
    seconds: float
    #: Of these, seconds in which compute waits for a copy.
    wait_seconds: float
    #: Seconds inside layers.
    compute_seconds: float
    #: Bytes that the step reads from homes, and bytes of gradients that it writes there.
    bytes_loaded: int
    bytes_stored: int
    #: The most bytes in each place: on the compute device (what the engine holds; the activations inside one cell come
    #: on top), at home (parameters, gradients, boundaries that are written out), and in host memory between the two
    #: ("staging"), which includes the buffers of optimizers.
    peak_bytes: dict[str, int]
    #: On the compute device on top of that: what layers save for their backward, of one cell where it is recomputed,
    #: of all cells where it is not; and the gradients of activations that one cell computes from it.
    activation_bytes: int
    #: The most bytes at one time in the memory that layers compute in, all of the above together; where that is host
    #: memory, homes in host memory included. Less than the sum of the above, whose peaks come at different times.
    memory_bytes: int


@dataclass(frozen=True)
class HomeBytes:
    """Bytes at home, which do not depend on the plan."""

    #: Where homes are.
    tier: str
    #: What a load of each shard reads.
    loads: Sequence[int]
    #: Weights, each once, and their gradients.
    weights: int
    gradients: int
    #: In host memory between home and device, with the buffers of optimizers.
    staging: int


def estimate_step(plan: Plan, costs: Costs, sizes: StepBytes, home: HomeBytes, *, on_host: bool) -> Estimate:
    """Predicts the training step of a plan; ``on_host``: layers compute in host memory."""
    forecast = simulate(plan, costs)
    peak = peak_memory(plan, replace(sizes, drained=forecast.drained))
    elsewhere = (home.staging if on_host else 0) + (home.weights if sizes.gradients_stay else 0)
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(home.loads[j] for j in plan.loads),
        bytes_stored=sum(sizes.gradient_bytes[a.shard] for a in plan.actions if a.kind is Kind.DRAIN),
        peak_bytes={
            "device": peak.device_bytes,
            home.tier: home.weights + home.gradients + peak.spilled_bytes,
            "staging": home.staging,
        },
        activation_bytes=peak.activation_bytes,
        memory_bytes=peak.memory_bytes + elsewhere,
    )
