"""Into how many micro-batches a batch is split."""

from __future__ import annotations

from typing import Any

from offload.engine.homes import ModelHomes
from offload.planning.rows import largest_rows
from pipe.nested import flatten

__all__ = ["MicroBatches"]


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
