"""Into how many micro-batches a batch is split."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.planning.rows import largest_rows, looks_across_rows
from pipe.nested import flatten

__all__ = ["MicroBatches"]


class MicroBatches:
    """Into how many parts a batch is split. ``given``: None where it is planned for each batch."""

    def __init__(self, given: int | None, homes: ModelHomes, engine: Engine) -> None:
        self.given = given
        self._homes, self._engine = homes, engine

    def rows(self, batch_rows: int | None) -> list[int]:
        """Rows of each micro-batch; one row each where nothing is known of the batch."""
        batch_rows = batch_rows or self.given or 1
        count = self.planned(batch_rows) if self.given is None else self.given
        count = max(1, min(count, batch_rows))
        return [batch_rows // count + (i < batch_rows % count) for i in range(count)]

    def count(self, inputs: Any) -> int:
        """Micro-batches of a batch of nested tensors."""
        if self.given is not None:
            return self.given
        leaves = flatten(inputs)[0]
        return self.planned(largest_rows(leaves), self._homes.row_units.count(leaves))

    def planned(self, rows: int, units: float | None = None) -> int:
        """Micro-batches of a training batch of so many rows: as few as fit; 1 where the result would be another.

        ``units``: as how many these rows count, if they are not as long as those of the first batch.
        """
        homes = self._homes
        planner = homes.steps.planner
        if planner is None or not torch.is_grad_enabled():
            return 1
        layers = [layer for shard in homes.shards for layer in shard.layers]
        if (self._engine.draws and not homes.policy.join_chunks) or looks_across_rows(layers):
            return 1
        count: int = planner.microbatches(rows, rows if units is None else units)
        return count
