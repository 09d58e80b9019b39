"""The plans of one model's steps: what a pass is planned from, what is known of sizes, and the steps that ran."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace

from offload.engine.cell import Cell, ReplayableShard
from offload.planning.peak_memory import graphs_that_fit
from offload.planning.plan import Action, Kind, Plan
from offload.planning.planner import Sizes, Updates, plan_step
from offload.planning.residency import MOVING, Residency, check_boundaries

__all__ = ["Steps", "joined"]


class Steps:
    """Makes the plans of a model.

    Args:
        runners: one for each shard.
        boundary_bytes: memory for boundaries and their gradients.
        recompute: whether cells are recomputed, but for those whose graphs fit in ``graph_bytes``.
        graph_bytes: for graphs between forward and backward.
        strict: whether a budget of memory was asked for.
        spills: whether boundaries can leave the memory that layers compute in. Else there is no other place for them.
        on_host: whether that is host memory, where buffers of optimizers are.
    """

    def __init__(
        self,
        replayables: Sequence[ReplayableShard],
        *,
        boundary_bytes: int,
        recompute: bool,
        graph_bytes: int,
        strict: bool,
        spills: bool,
        on_host: bool,
    ) -> None:
        self._replayables = replayables
        self._shards = len(replayables)
        self._boundary_bytes = boundary_bytes if spills else math.inf
        #: What others take of the same memory, as long as they live.
        self._reserved: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._recompute = recompute
        self._graph_bytes = graph_bytes
        self._strict = strict and spills
        self._on_host = on_host
        #: Bytes of what enters a shard, and of its gradient, for a micro-batch of so many rows; of the last step.
        self.boundary_bytes: dict[tuple[int, int], int] = {}
        self.gradient_bytes: dict[tuple[int, int], int] = {}
        #: The least that any boundary was seen to take for each element of the model's input.
        self._least_per_element: dict[int, float] = {}
        #: The last step with a backward, and the last without; and the rows of its batch.
        self._ran: dict[bool, tuple[Plan, int]] = {}

    def kept_cells(self, rows: Sequence[int], first: int) -> frozenset[Cell]:
        """The cells that keep their graphs.

        Args:
            rows: of each micro-batch.
            first: the first shard that backward has to reach.
        """
        everything = range(len(rows))
        if not self._recompute:
            return frozenset(Cell(j, i) for j in range(first, self._shards) for i in everything)
        # A recomputation would write once more.
        writing = (
            j for j, replayable in enumerate(self._replayables) if replayable.repeats_writes is False and j >= first
        )
        kept = frozenset(Cell(j, i) for j in writing for i in everything)
        if self._graph_bytes:
            known = [replayable.graph_bytes_per_row for replayable in self._replayables]
            fitting = graphs_that_fit(known, rows, first=first, budget_bytes=self._graph_bytes)
            kept |= {Cell(*key) for key in fitting}
        return kept

    @property
    def _budget_bytes(self) -> float:
        """For boundaries; their gradients have as much."""
        shared = self._strict and self._on_host
        return (self._boundary_bytes - (self.reserved_bytes if shared else 0)) / 2

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that buffers of optimizers take."""
        return sum(self._reserved.values())

    def reserve(self, owner: object, nbytes: int) -> None:
        """Leaves so many bytes to ``owner``, as long as it lives; under a budget boundaries have less."""
        self._reserved[owner] = nbytes

    def spare_bytes(self) -> float:
        """What may be reserved: half of what boundaries have, and no boundary that was seen may suffer."""
        if not (self._strict and self._on_host):
            return math.inf
        seen = max(self.boundary_bytes.values(), default=0)
        free = self._boundary_bytes - self.reserved_bytes
        return min(free // 2, free - 2 * MOVING * seen)

    def residency(self, *, gradients: bool = False) -> Residency:
        """Plans which boundaries, or their gradients, stay in memory."""
        # Without recomputation boundaries are in the graphs.
        budget = self._budget_bytes if self._recompute or gradients else math.inf
        return Residency(budget, gradients=gradients, strict=self._strict)

    # --- sizes --------------------------------------------------------------------------------------------------

    def sizes(self, rows: Sequence[int], *, gradients: bool = False) -> Sizes:
        """What boundaries of micro-batches of so many rows take, as they were seen; 0 where nothing was."""
        seen = self.gradient_bytes if gradients else self.boundary_bytes
        per_row = {j: nbytes / max(count, 1) for (j, count), nbytes in seen.items()}
        return lambda key: seen.get((key[0], rows[key[1]]), round(per_row.get(key[0], 0.0) * rows[key[1]]))

    def check_input(self, elements: Sequence[int], *, training: bool) -> None:
        """Raises ValueError if boundaries are known to be too large for the budget, before anything moves.

        Args:
            elements: of the input of each micro-batch; 0 where they are not known.
            training: whether a backward follows, where the output has a gradient.
        """
        if self._strict:
            each = [least for j, least in self._least_per_element.items() if training or j < self._shards]
            check_boundaries(int(max(elements) * max(each, default=0)), self._budget_bytes)

    def saw_boundary(self, j: int, rows: int, elements: int, nbytes: int, *, training: bool) -> None:
        """Notes what enters shard ``j``, or the output of the last one.

        Raises:
            ValueError: if the budget is too small for it in forward, or for its gradient in backward.
        """
        self.boundary_bytes[j, rows] = nbytes
        if elements:
            each = nbytes / elements
            self._least_per_element[j] = min(each, self._least_per_element.get(j, each))
        if self._strict and (training or j < self._shards):
            check_boundaries(nbytes, self._budget_bytes)

    # --- steps that ran ---------------------------------------------------------------------------------------------

    def ran(self, plan: Plan, rows: Sequence[int], *, training: bool) -> None:
        """Notes a whole step that ran."""
        self._ran[training] = plan, sum(rows)

    def plan(self, rows: Sequence[int], updates: Updates, *, slots: int, training: bool) -> Plan:
        """The plan of a step that did not run yet, from empty slots, on micro-batches that need no gradient themselves.

        Raises:
            ValueError: if boundaries are known to be too large for the budget.
        """
        trainable = (replayable.shard.index for replayable in self._replayables if replayable.shard.trainable)
        first = next(trainable, self._shards)
        return plan_step(
            self._shards,
            slots=slots,
            microbatches=len(rows),
            training=training and first < self._shards,
            first=first,
            kept=self.kept_cells(rows, first),
            boundaries=self.residency(),
            gradients=self.residency(gradients=True),
            boundary_sizes=self.sizes(rows),
            gradient_sizes=self.sizes(rows, gradients=True),
            **updates,
        )

    def last(self, rows: int | None, *, training: bool) -> Plan | None:
        """The last step that ran on a batch of so many rows, if there was none on another one since."""
        plan, count = self._ran.get(training, (None, None))
        return plan if rows is None or rows == count else None


def joined(forward: Plan, backward: Plan) -> Plan:
    """The plan of a step from those of its passes. In between, shards may have been dropped, and others loaded."""
    left, found = forward.resident_after, backward.resident
    between = [Action(Kind.EVICT, j) for j in sorted(left - found)] + [
        Action(Kind.LOAD, j) for j in sorted(found - left)
    ]
    return replace(
        forward, actions=(*forward.actions, *between, *backward.actions), pending=forward.pending | backward.pending
    )
