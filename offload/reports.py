"""What an ``OffloadModel`` reports of its steps: counts, plans, predictions, the use of memory, traces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from offload.engine.executor import Executor
from offload.engine.prediction import predict_step
from offload.engine.row_units import largest_rows
from offload.planning.estimate import Estimate
from offload.planning.plan import Plan
from offload.policy import MemoryPolicy
from offload.slot_sharing import SlotSharingModule
from offload.storage import Tier
from offload.telemetry.memory_report import MemoryReport
from offload.telemetry.statistics import Meter, Statistics
from offload.telemetry.trace import Event
from pipe.nested import flatten

__all__ = ["ReportingModule"]


class ReportingModule(SlotSharingModule):
    """The part of a model that reports."""

    _executor: Executor
    _meter: Meter
    _tier: Tier
    _policy: MemoryPolicy
    #: None: planned for each batch.
    _num_microbatches: int | None
    #: Whether micro-batches can be planned: layers are called one after the other.
    _plans_microbatches = True

    @property
    def memory_policy(self) -> MemoryPolicy:
        """What the model may hold, with the slots and bytes that were decided."""
        return self._policy

    def statistics(self) -> Statistics:
        """Counts of loads, stores and waits since the model was made."""
        return self._meter.read()

    def plan(self, batch_rows: int | None = None, *, training: bool = True) -> Plan:
        """The plan of a step: ``print(model.plan())``.

        That of the last step which ran, if its batch had ``batch_rows`` rows, or None is given. Otherwise that of the
        next step, from empty slots; with an ``OffloadOptimizer`` it begins with the updates of a step before.
        Boundaries of unknown size are assumed to stay in memory.

        Args:
            batch_rows: a batch of few rows has fewer micro-batches.
            training: whether there is a backward.
        """
        ran = self._executor.steps.last(batch_rows, training=training)
        rows = self._rows_of_micro_batches(batch_rows or self._num_microbatches or 1)
        return ran or self._executor.next_plan(rows, training=training)

    def _rows_of_micro_batches(self, batch_rows: int) -> list[int]:
        """Rows of each micro-batch."""
        given = self._num_microbatches
        count = max(1, min(self._executor.microbatches(batch_rows) if given is None else given, batch_rows))
        return [batch_rows // count + (i < batch_rows % count) for i in range(count)]

    def _microbatches_of(self, inputs: Any) -> int:
        """Micro-batches of a batch of nested tensors."""
        given = self._num_microbatches
        if given is not None:
            return given
        leaves = flatten(inputs)[0]
        return self._executor.microbatches(largest_rows(leaves), self._executor.row_units.count(leaves))

    def _check_splitting(self, num_microbatches: int | None, *, plans: bool) -> None:
        """Raises ValueError for ``num_microbatches=None`` where no plan chooses them."""
        if num_microbatches is None and not (plans and self._plans_microbatches):
            needed = "layers that are called one after the other"
            if self._plans_microbatches:
                needed = "a memory, whose plan chooses them"
            raise ValueError(f"num_microbatches=None needs {needed}; pass the number of micro-batches")

    def estimate(self, batch_rows: int) -> Estimate:
        """Predicts a training step on a batch of ``batch_rows`` rows: seconds, bytes moved, peak bytes by tier.

        The plan is simulated with the median of the latest layer times and bandwidths, without the first step's; times
        of layers are assumed to be proportional to rows. A process is often slow in its second step, too, so times are
        better after some more steps. Bytes are as good after the first.

        Raises:
            RuntimeError: if no training step has run yet.
            ValueError: if ``memory`` is too small for such a batch.
        """
        executor, rows = self._executor, self._rows_of_micro_batches(batch_rows)
        plan = executor.next_plan(rows, training=True)
        return predict_step(plan, rows, executor, meter=self._meter, tier=self._tier)

    def memory_report(self) -> MemoryReport:
        """How steps use the memory that they may, and why: ``print(model.memory_report())``.

        It has each choice with its bytes, predicted and measured, the runner-up and what more memory would buy;
        ``.plot("memory.png")`` draws the memory over one step. Raises RuntimeError if there is no ``memory``.
        """
        return self._executor.memory_report()

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[list[Event]]:
        """Records compute and each lane in this context, and writes the trace to ``path`` for https://ui.perfetto.dev.

        ``with model.trace("step.json") as events: ...``; the events are named as in the plan.
        """
        tracer = self._meter.tracer
        with tracer.recording(self._executor.bytes_at_home) as events:
            tracer.sample(self._meter.held_bytes)
            yield events
        tracer.write(path, events)
