"""What an ``OffloadModel`` reports of its steps: plans, predictions, the use of memory, traces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from offload.engine.homes import ModelHomes
from offload.engine.plans.prediction import Estimate, next_plan, predict_step
from offload.engine.plans.rows import largest_rows
from offload.planning.plan import Plan
from offload.telemetry.trace import Event
from pipe.nested import flatten

__all__ = ["MicroBatches", "Reports"]


class MicroBatches:
    """Into how many parts a batch is split. ``given``: None where it is planned for each batch."""

    def __init__(self, given: int | None, homes: ModelHomes) -> None:
        self.given = given
        self._homes = homes

    def rows(self, batch_rows: int | None) -> list[int]:
        """Rows of each micro-batch; one row each where nothing is known of the batch."""
        batch_rows = batch_rows or self.given or 1
        count = self._homes.microbatches(batch_rows) if self.given is None else self.given
        count = max(1, min(count, batch_rows))
        return [batch_rows // count + (i < batch_rows % count) for i in range(count)]

    def count(self, inputs: Any) -> int:
        """Micro-batches of a batch of nested tensors."""
        if self.given is not None:
            return self.given
        leaves = flatten(inputs)[0]
        return self._homes.microbatches(largest_rows(leaves), self._homes.row_units.count(leaves))


class Reports:
    """What a model reports of its steps; the methods are those of :class:`~offload.OffloadModel`."""

    def __init__(self, homes: ModelHomes, micro_batches: MicroBatches) -> None:
        self._homes, self._micro_batches = homes, micro_batches

    def plan(self, batch_rows: int | None, *, training: bool) -> Plan:
        """See :meth:`offload.OffloadModel.plan`."""
        ran = self._homes.steps.last(batch_rows, training=training)
        return ran or next_plan(self._homes, self._micro_batches.rows(batch_rows), training=training)

    def estimate(self, batch_rows: int) -> Estimate:
        """See :meth:`offload.OffloadModel.estimate`."""
        return predict_step(self._homes, self._micro_batches.rows(batch_rows))

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[list[Event]]:
        """See :meth:`offload.OffloadModel.trace`."""
        meter = self._homes.meter
        tracer = meter.tracer
        with tracer.recording(self._homes.bytes_at_home) as events:
            tracer.sample(meter.held_bytes)
            yield events
        tracer.write(path, events)
