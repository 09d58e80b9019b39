"""What an executor makes for its shards: runners, their executor, plans and counts of references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload.engine.cell import ShardRunner
from offload.engine.cell_executor import CellExecutor
from offload.engine.mesh_planner import planner_for
from offload.engine.references import References
from offload.engine.steps import Steps
from offload.storage import Tier
from offload.streaming.shard import Shard

if TYPE_CHECKING:
    from offload.engine.homes import MovableHomes

__all__ = ["ShardParts"]


@dataclass(frozen=True)
class ShardParts:
    """The parts of an executor that belong to its cuts: they are replaced together."""

    shards: list[Shard]
    runners: list[ShardRunner]
    cell_executor: CellExecutor
    #: Makes plans, and keeps those that ran.
    steps: Steps
    references: References

    @classmethod
    def make(cls, executor: MovableHomes, shards: list[Shard], tier: Tier) -> ShardParts:
        """The parts for some shards."""
        device, policy, recompute = executor.device, executor.policy, executor.recompute
        names = [name for name, _ in executor.layer_homes.layers]
        if executor.layers_apart:
            places = [(s, k) for s in shards for k in range(len(s.layers))]
            runners = [ShardRunner(s, [names[s.first + k]], device, only=k) for s, k in places]
        else:
            runners = [ShardRunner(s, names[s.first : s.first + len(s.layers)], device) for s in shards]
        for runner in runners:
            runner.measures_graphs = recompute and bool(policy.graph_bytes)
        cell_executor = CellExecutor(
            runners,
            device=device,
            meter=executor.meter,
            param_dtype=executor.layer_homes.dtype,
        )
        steps = Steps(
            cell_executor.shards,
            policy=policy,
            recompute=recompute,
            spills=tier.scratch() is not None,
            on_host=device.type == "cpu",
        )
        if executor.planned is not None:
            steps.planner = planner_for(*executor.planned, executor)
        stored = [s.parameter for layer in executor.layer_homes.places for s in layer]
        watched = [p for runner in runners for _, p in runner.watched.parameters]
        return cls(
            shards,
            runners,
            cell_executor,
            steps,
            References(shards, [*stored, *watched, *executor.held_by_engine()]),
        )
