"""Averages embedding tables over their replicas every few optimizer steps (torchrec's 2D sharding, DMPCollection).

A ``DMPCollection`` replicates tables over groups of ranks, each of which shards them, and trains each replica on its
own. The training loop has to call its ``sync``, which averages tables and the states of their fused optimizers.
"""

from __future__ import annotations

from torch import nn

__all__ = ["ReplicatedTables"]


class ReplicatedTables:
    """Averages the tables of a model that is a ``DMPCollection``, and does nothing to other models.

    Args:
        interval: optimizer steps between two averages; the first step averages as well. None: never.

    Raises:
        TypeError: if ``interval`` is neither None nor an int.
        ValueError: if it is not positive.
    """

    def __init__(self, interval: int | None) -> None:
        if interval is not None and (not isinstance(interval, int) or isinstance(interval, bool)):
            raise TypeError(f"expected dmp_collection_sync_interval_batches to be None or an int, got {interval!r}")
        if interval is not None and interval < 1:
            raise ValueError(f"expected dmp_collection_sync_interval_batches >= 1 or None, got {interval}")
        self._interval = interval
        self._steps = 0

    def average(self, model: nn.Module) -> None:
        """Averages the tables if this step is due (a collective call). Called before each optimizer step."""
        due = self._interval is not None and self._steps % self._interval == 0
        self._steps += 1
        # Compared by name, so that torchrec need not be imported (or installed).
        if due and any(kind.__name__ == "DMPCollection" for kind in type(model).__mro__):
            model.sync()  # type: ignore[operator]
