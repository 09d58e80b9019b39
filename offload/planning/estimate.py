"""What a step will cost, before it runs: the plan simulated with the bandwidths and layer times that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.planning.peak_memory import PeakMemory
from offload.planning.planner import Updates, plan_step
from offload.planning.simulate import Costs, simulate
from offload.storage import Tier
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter

__all__ = ["Estimate", "estimate_step"]


@dataclass(frozen=True)
class Estimate:
    """Prediction for one step, forward and backward."""

    #: Seconds from the first load to the last gradient at home, without the user's loss; with the updates of an
    #: ``OffloadOptimizer``, without any other optimizer.
    seconds: float
    #: Of these, seconds in which compute stands still for a load.
    wait_seconds: float
    #: Seconds inside layers.
    compute_seconds: float
    #: Bytes that the step takes from home, and sends there.
    bytes_loaded: int
    bytes_stored: int
    #: The most bytes of each tier: on the compute device (what the engine holds; the activations inside one cell come
    #: on top), at home (parameters, gradients, boundaries that rest there), and in host memory between the two
    #: ("staging"), buffers of optimizers among it.
    peak_bytes: dict[str, int]
    #: On the compute device on top of that: what layers keep for their backward, of one cell where it is computed
    #: again, of all cells where it is not; and the gradients that one cell pushes through that.
    activation_bytes: int
    #: What is in use at the fullest moment in the memory that layers compute in, of all these together; where that is
    #: host memory, homes that are in host memory too. Less than the sum of the above, which are not all there at once.
    memory_bytes: int


def estimate_step(
    shards: Sequence[Shard],
    meter: Meter,
    *,
    slots: int,
    rows: Sequence[int],
    boundary_budget_bytes: int,
    tier: Tier,
    device: torch.device,
    updates: Updates,
    reserved_bytes: int = 0,
) -> Estimate:
    """Predicts a training step with ``rows[i]`` rows in micro-batch i; optimizers have ``reserved_bytes`` of buffers.

    Raises:
        RuntimeError: if no training step has been measured yet.
    """
    seen = all(meter.cell_seconds_per_row("B", shard.index) for shard in shards if shard.trainable)
    if not seen or not meter.bytes_loaded:
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    load, drain, update = (meter.copy_seconds_per_byte(lane) for lane in ("load", "drain", "update"))
    home_bytes = [sum(s.nbytes for s in shard.at_home) for shard in shards]
    gradient_bytes = [sum(s.nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    mean_rows = sum(rows) / len(rows)

    def cell_seconds(kind: str, j: int) -> float:
        return meter.cell_seconds_per_row(kind, j) * mean_rows

    plan = plan_step(len(shards), slots=slots, microbatches=len(rows), **updates)
    forecast = simulate(
        plan,
        Costs(
            load=[nbytes * load for nbytes in home_bytes],
            forward=[cell_seconds("F", shard.index) for shard in shards],
            backward=[cell_seconds("B", shard.index) for shard in shards],
            drain=[nbytes * drain for nbytes in gradient_bytes],
            slot_bytes=max(shard.slot_bytes for shard in shards),
            update=[nbytes * update for nbytes in gradient_bytes],
        ),
    )
    # On the CPU a home in host memory takes gradients as they are.
    gradients_stay = device.type == "cpu" and not tier.blocking_io
    own = [s for shard in shards for s in shard.own]
    at_rest = sum(s.nbytes for s in own)
    n, all_rows = len(shards), sum(rows)
    levels = [int(nbytes * all_rows) for j, nbytes in meter.boundary_bytes_per_row.items() if j < n]
    resting = [0 if j in meter.keeping else int(meter.boundary_bytes_per_row.get(j, 0) * all_rows) for j in range(1, n)]
    # Boundaries have one half of the budget, their gradients, of which two levels exist at a time, the other.
    most_boundary_bytes = math.inf if gradients_stay else boundary_budget_bytes // 2
    resident = int(min(sum(resting), most_boundary_bytes))
    gradients_of_boundaries = int(min(2 * max(levels, default=0), most_boundary_bytes))
    gradients_in_flight = 0 if gradients_stay else 2 * max(gradient_bytes)

    def cells_beside(j: int) -> int:
        # A cell that is computed again is not full before it has been.
        again = 0.0 if j - 1 in meter.keeping else cell_seconds("F", j - 1)
        late = drain * gradient_bytes[j] - again
        each = cell_seconds("B", j - 1)
        return 0 if late <= 0 else len(rows) if late >= len(rows) * each else math.ceil(late / each)

    peak_memory = PeakMemory(
        fixed_bytes=forecast.slot_bytes + (at_rest if gradients_stay else 0),
        rows=rows,
        gradient_bytes=gradient_bytes,
        gradients_stay=gradients_stay,
        in_flight={j: cells_beside(j) for j in range(1, n)},
        boundary_bytes_per_row=meter.boundary_bytes_per_row,
        most_boundary_bytes=most_boundary_bytes,
        memory_profiles=meter.memory_profiles,
        keeping=meter.keeping,
    )
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(home_bytes[j] for j in plan.loads),
        bytes_stored=sum(gradient_bytes),
        peak_bytes={
            "device": forecast.slot_bytes + gradients_in_flight + resident + gradients_of_boundaries,
            tier.name: at_rest + sum(s.nbytes for s in own if s.parameter.requires_grad) + sum(resting) - resident,
            "staging": tier.staging_bytes + reserved_bytes,
        },
        activation_bytes=peak_memory.activation_bytes(),
        memory_bytes=peak_memory.peak_bytes() + (tier.staging_bytes + reserved_bytes if device.type == "cpu" else 0),
    )
