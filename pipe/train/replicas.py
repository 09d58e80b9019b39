"""Embedding tables that are replicated over groups of ranks, each of which shards them (torchrec's 2D sharding).

A ``DMPCollection`` trains each replica on its own; who runs the training loop has to call its ``sync``, which averages
tables and the states of their fused optimizers.
"""

from __future__ import annotations

from torch import nn

__all__ = ["ReplicatedTables"]


class ReplicatedTables:
    """Averages the tables of a model that is a ``DMPCollection``, and does nothing to other models.

    Args:
        interval: every so many steps, the first one included; None: never.

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
        """Called before each optimizer step: a collective call if it is the turn of an average."""
        due = self._interval is not None and self._steps % self._interval == 0
        self._steps += 1
        # By name: torchrec is not imported, since a user who has no torchrec has no such model either.
        if due and any(kind.__name__ == "DMPCollection" for kind in type(model).__mro__):
            model.sync()  # type: ignore[operator]
