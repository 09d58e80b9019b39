"""Plans steps under a limit of memory where ranks share a model: what decides the order of collectives is common.

Loads of shards are collectives, and their order follows from the number of slots. Each rank measures its own steps and
chooses for its own limit; all then use the least number of slots that any of them chose. What concerns one rank alone
(graphs that are kept, boundaries that are spilled, gradients that wait) it chooses for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.engine.homes import ModelHomes
from offload.engine.plans.memory_planner import MemoryPlanner
from offload.limits import MemoryLimits
from offload.planning.step_model import Choice
from offload.policy import MemoryPolicy
from offload.storage.buffer import has_own_memory

__all__ = ["MeshMemoryPlanner", "plan_memory"]

#: Of a limit of memory, staging buffers of transfers take at most one part in so many.
STAGING_SHARE = 16
#: What a rank tells the others at the begin of a step: earlier forwards wait for their backward; none does; it needs
#: another plan.
_BUSY, _IDLE, _DUE = 0.0, 1.0, 2.0


def plan_memory(homes: ModelHomes, limits: MemoryLimits, policy: MemoryPolicy) -> None:
    """Chooses the plans of steps by what they measure, within the limits, if the policy leaves anything open."""
    if not policy.plans:
        return
    if not has_own_memory(homes.device):
        homes.tier.limit_staging(limits.device.nbytes // STAGING_SHARE)
    kind = MeshMemoryPlanner if homes.public.sharded else MemoryPlanner
    homes.steps.planner = kind(limits, policy, homes)


class MeshMemoryPlanner(MemoryPlanner):
    """Plans the steps of this rank. All ranks begin and end the same steps."""

    def __init__(self, limits: MemoryLimits, policy: MemoryPolicy, homes: ModelHomes) -> None:
        super().__init__(limits, policy, homes)
        self._public = homes.public
        #: What this rank chose.
        self._wanted = Choice(self._streamer.slots)

    def begin(self, rows: Sequence[float], rounded: Sequence[float], *, samples: int, idle: bool) -> Sequence[float]:
        """Begins a training step on all ranks, which try no other sizes after one has refused.

        Raises:
            ValueError: if no plan of this rank's step fits; RuntimeError on the other ranks, with the rank.
        """
        self._samples = samples
        statuses = self._public.compare("a step with memory=", self._status(rounded) if idle else _BUSY)
        self._due = _DUE in statuses and _BUSY not in statuses
        refused: ValueError | None = None
        try:
            super().begin(rounded, rounded, samples=samples, idle=_BUSY not in statuses)
        except ValueError as error:
            refused = error
        failed = self._public.compare("a step with memory=", float(refused is not None))
        if refused is not None:
            raise refused
        if any(failed):
            raise RuntimeError(
                f"rank {failed.index(1.0)} of the mesh refused its batch, which does not fit in its memory=; see its "
                f"error"
            )
        return rounded

    def all_stays(self, rows: Sequence[float]) -> bool:
        """No step is without a plan: all ranks begin each of them together."""
        return False

    def _status(self, rows: Sequence[float]) -> float:
        """The number that tells the other ranks whether this one needs another plan."""
        stepped = self._awaited != self._streamer.gradient_offload.optimizers.awaits_states()
        if not (self._due or stepped) and self._steps_done:
            try:
                self._choose(rows, idle=False)
            except ValueError:
                return _DUE
        return _DUE if self._due or stepped else _IDLE

    def _plan_again(self, rows: Sequence[float]) -> None:
        """Plans for this rank, then takes the least number of slots of all."""
        self._wanted = Choice(self._streamer.slots)
        refused: ValueError | None = None
        try:
            super()._plan_again(rows)
        except ValueError as error:
            refused = error
        slots = self._public.compare("a plan for memory=", 0 if refused is not None else self._wanted.slots)
        least = int(min(slots))
        if refused is not None:
            raise refused
        if least:  # else another rank refuses its batch
            super()._switch(replace(self._wanted, slots=least))

    def _switch(self, choice: Choice) -> None:
        self._wanted = choice

    def _choose(self, rows: Sequence[float], *, idle: bool) -> None:
        super()._choose(rows, idle=False)  # ranks plan again together only
