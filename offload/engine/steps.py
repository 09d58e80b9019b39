"""Makes the plans of one model's steps from the sizes seen so far, and keeps those that ran."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from offload.planning.plan import Plan
from offload.planning.rows import remember
from offload.planning.step_model import Choice, Key, Sizes
from offload.policy import MemoryPolicy
from offload.streaming.shard import Shard

__all__ = ["Steps"]


#: Of a limit of memory, buffers of an optimizer take at most one part in so many.
BUFFERS_SHARE = 8
#: Or this much, where it is at most half of the limit: less is too little for any update in files.
SMALLEST_BUFFERS_BYTES = 256 << 10


class SizesSeen:
    """Bytes of the boundary of each shard, by the rows of a micro-batch."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._seen: dict[tuple[int, float], int] = {}

    def add(self, j: int, rows: float, nbytes: int) -> None:
        """Adds one."""
        remember(self._seen, (j, rows), nbytes, per_size=self._shards)

    def now(self) -> Sizes:
        """Those of any rows, from those seen so far; 0 if unknown."""
        seen = self._seen.copy()
        per_row = {j: nbytes / (rows or 1) for (j, rows), nbytes in seen.items()}
        return lambda j, rows: seen.get((j, rows), round(per_row.get(j, 0.0) * rows))


class Steps:
    """Makes the plans of a model.

    Args:
        shards: of the model.
        policy: its ``boundary_bytes`` hold boundaries and their gradients.
        recompute: recompute cells, except those whose graphs fit in its ``graph_bytes`` between forward and backward.
        spills: whether boundaries can be moved out of the memory in which layers compute.
        on_host: whether that is host memory, as for the buffers of optimizers.
        apart: whether the layers of a shard run one by one.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        policy: MemoryPolicy,
        recompute: bool,
        spills: bool,
        on_host: bool,
        apart: bool = False,
    ) -> None:
        self._shards = shards
        #: Bytes of a kept graph for each row, by shard and layer, where a recomputed cell measured it.
        self.graph_per_row: dict[int, dict[int, float]] = {}
        #: The same of what a recomputed cell keeps.
        self.selected_per_row: dict[int, dict[int, float]] = {}
        #: Bytes of the casts of the weights of each shard and layer.
        self.cast_bytes: dict[int, dict[int, int]] = {}
        #: Whether a boundary holds what enters each block of a shard, of which there are several.
        self.boundaries_grow = apart and any(len(shard.layers) > 1 for shard in shards)
        self._boundary_bytes = policy.boundary_bytes or 0 if spills else math.inf
        self._recompute = recompute
        self._apart = apart
        self._graph_bytes = policy.graph_bytes or 0
        self._on_host = on_host
        #: The :class:`.MemoryPlanner` of a model with a limit of memory, which knows this object.
        self.planner: Any = None
        #: Bytes of the boundaries of shards and of the output, and of their gradients.
        self.boundaries, self.gradients = SizesSeen(len(shards) + 1), SizesSeen(len(shards) + 1)
        #: Of what enters the first block of a model, for each row: the code around blocks holds it until backward.
        self.around_per_row = 0.0
        #: The last step with a backward, the last one without, and the rows of their batches.
        self._last_steps: dict[bool, tuple[Plan, float]] = {}

    def kept_cells(self, rows: Sequence[float], first: int) -> frozenset[Key]:
        """The cells that keep their graphs, for micro-batches of so many rows."""
        everything = range(len(rows))
        if not self._recompute:
            return frozenset((j, i) for j in range(first, len(self._shards)) for i in everything)
        if self.planner is not None:
            return frozenset(self.planner.choice.kept if self.planner.choice is not None else ())
        if not self._graph_bytes:
            return frozenset()
        measured = self.graph_bytes_per_row()
        cells = [(j, i) for j in range(len(self._shards) - 1, first - 1, -1) for i in everything]
        total = itertools.accumulate(measured.get(j, math.inf) * rows[i] for j, i in cells)
        # Backward frees kept graphs before it recomputes a cell.
        return frozenset(cells[: sum(nbytes <= self._graph_bytes for nbytes in total)])

    @property
    def boundary_budget_bytes(self) -> float:
        """Budget of boundaries; that of their gradients is equal."""
        if math.isinf(self._boundary_bytes):
            return math.inf  # there is no place to spill to, whatever a choice says
        choice: Choice | None = None if self.planner is None else self.planner.choice
        return self._boundary_bytes / 2 if choice is None else choice.boundary_bytes

    def spare_bytes(self, limit_bytes: int | None = None) -> float:
        """Bytes that buffers of an optimizer may take.

        ``limit_bytes``: of a model with another limit of memory.
        """
        if math.isinf(self._boundary_bytes) or self.planner is None or not self._on_host:
            return math.inf  # homes are in memory, where updates need no buffers, or nothing is limited
        limit = self.planner.limit_bytes if limit_bytes is None else limit_bytes
        return max(limit // BUFFERS_SHARE, min(limit // 2, SMALLEST_BUFFERS_BYTES))

    # --- sizes --------------------------------------------------------------------------------------------------

    def graph_bytes_per_row(self) -> dict[int, float]:
        """Bytes of a kept graph of each shard for each row, where a recomputed cell measured it."""
        known = self.graph_per_row
        blocks = [len(shard.layers) if self._apart else 1 for shard in self._shards]
        return {j: sum(each.values()) for j, each in known.items() if len(each) == blocks[j]}

    # --- steps that ran ---------------------------------------------------------------------------------------------

    def record_step(self, plan: Plan, rows: Sequence[float], planned: Sequence[float], *, training: bool) -> None:
        """Records the plan of a step that ran, and the sizes for which it was planned."""
        if training and self.planner is not None:
            self.planner.end(planned)
        self._last_steps[training] = plan, sum(rows)

    def last(self, rows: float | None, *, training: bool) -> Plan | None:
        """The plan of the last step, if its batch had so many rows; any for None."""
        plan, count = self._last_steps.get(training, (None, None))
        return plan if rows is None or rows == count else None
