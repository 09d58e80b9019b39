"""What a step will cost, before it runs: the plan simulated with the bandwidths and layer times that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan import Updates, plan_step
from offload.shard import Shard
from offload.simulate import Costs, simulate
from offload.statistics import Meter

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
    #: Peak bytes by tier: on the compute device (what the engine holds; the activations inside one cell come on top),
    #: at home (parameters, gradients, boundaries that rest there), and in host memory between the two ("staging").
    peak_bytes: dict[str, int]
    #: On the compute device on top of that: what layers keep for their backward, of one cell where it is computed
    #: again, of all cells where it is not; and as much again of one cell, for the gradients of what it keeps.
    activation_bytes: int


def estimate_step(
    shards: Sequence[Shard],
    meter: Meter,
    *,
    slots: int,
    rows: Sequence[int],
    boundary_budget_bytes: int,
    home: str,
    staging_bytes: int,
    updates: Updates,
) -> Estimate:
    """Predicts a training step with ``rows[i]`` rows in micro-batch i.

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
    levels = [int(nbytes * sum(rows)) for nbytes in meter.boundary_bytes_per_row.values()]
    boundaries = sum(levels)
    # Boundaries have one half of the budget, their gradients, of which two levels exist at a time, the other.
    resident = min(boundaries, boundary_budget_bytes // 2)
    gradients_of_boundaries = min(2 * max(levels, default=0), boundary_budget_bytes // 2)
    kept = meter.kept_bytes_per_row.values()
    of_one_cell = max(meter.activation_bytes_per_row, *kept, 0.0) * max(rows)
    return Estimate(
        seconds=forecast.seconds,
        wait_seconds=forecast.wait_seconds,
        compute_seconds=forecast.compute_seconds,
        bytes_loaded=sum(home_bytes[j] for j in plan.loads),
        bytes_stored=sum(gradient_bytes),
        peak_bytes={
            "device": forecast.slot_bytes + 2 * max(gradient_bytes) + resident + gradients_of_boundaries,
            home: sum(home_bytes) + sum(gradient_bytes) + boundaries - resident,
            "staging": staging_bytes,
        },
        activation_bytes=int(meter.activation_bytes_per_row * max(rows) + sum(kept) * sum(rows) + of_one_cell),
    )
