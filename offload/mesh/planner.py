"""Plans steps under a limit of memory where ranks share a model: what decides the order of collectives is common.

Loads of shards are collectives, and their order follows from the number of slots. Each rank measures its own steps and
chooses for its own limit; all then use the least number of slots that any of them chose. What concerns one rank alone
(graphs that are kept, boundaries that are spilled, gradients that wait) it chooses for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.planner.memory_planner import MemoryPlanner
from offload.planning.step_model import Choice

__all__ = ["MeshMemoryPlanner"]

#: What a rank tells the others at the begin of a step: earlier forwards wait for their backward; none does; it needs
#: another plan. And at its end, that its batch does not fit.
_BUSY, _IDLE, _DUE, _REFUSED = 0.0, 1.0, 2.0, -1.0


class MeshMemoryPlanner(MemoryPlanner):
    """Plans the steps of this rank. All ranks begin and end the same steps."""

    #: What this rank chose.
    _wanted: Choice

    def begin(self, rows: Sequence[float], rounded: Sequence[float], *, samples: int, idle: bool) -> Sequence[float]:
        """Begins a training step on all ranks, which try no other sizes after one has refused.

        Raises:
            ValueError: if no plan of this rank's step fits; RuntimeError on the other ranks, with the rank.
        """
        self._samples, what = samples, "a step with memory="
        statuses = self._homes.public.compare(what, self._status(rounded) if idle else _BUSY)
        self._due = _DUE in statuses and _BUSY not in statuses

        def begin() -> float:
            self._begin(rounded, idle=_BUSY not in statuses)
            return 0.0

        if _REFUSED in (found := self._on_all(what, begin)):
            raise RuntimeError(
                f"rank {found.index(_REFUSED)} of the mesh refused its batch, which does not fit in its memory=; see "
                f"its error"
            )
        return rounded

    def all_stays(self, rows: Sequence[float]) -> bool:
        """No step is without a plan: all ranks begin each of them together."""
        return False

    def _on_all(self, what: str, act: Callable[[], float]) -> Sequence[float]:
        """What ``act`` returns on each rank. A ValueError is raised again here, after the others know of it."""
        error, found = None, _REFUSED
        try:
            found = act()
        except ValueError as refused:
            error = refused
        everywhere = self._homes.public.compare(what, found)
        if error is not None:
            raise error
        return everywhere

    def _status(self, rows: Sequence[float]) -> float:
        """The number that tells the other ranks whether this one needs another plan."""
        stepped = self._awaited != self._optimizers.awaits_states()
        if not (self._due or stepped) and self._steps_done:
            try:
                self._choose(rows, idle=False)
            except ValueError:
                return _DUE
        return _DUE if self._due or stepped else _IDLE

    def _plan_again(self, rows: Sequence[float]) -> None:
        """Plans for this rank, then takes the least number of slots of all."""

        def plan() -> float:
            super(MeshMemoryPlanner, self)._plan_again(rows)
            return self._wanted.slots

        slots = self._on_all("a plan for memory=", plan)
        if _REFUSED not in slots:
            super()._switch(replace(self._wanted, slots=int(min(slots))))

    def _switch(self, choice: Choice) -> None:
        self._wanted = choice

    def _choose(self, rows: Sequence[float], *, idle: bool) -> None:
        super()._choose(rows, idle=False)  # ranks plan again together only
