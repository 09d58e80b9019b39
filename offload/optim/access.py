"""What an optimizer may do with a model besides reading its parameters.

What the model knows of its optimizers is in :mod:`offload.streaming.optimizers`.

Invariant: what an optimizer switches on ends with it. The model refers to optimizers weakly, and what they want of a
backward (norms, gradients that wait in memory, updates) is asked of those that are alive when it begins. An update that
is pending owns what it needs, so it is still applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from offload.engine.executor import Executor
    from offload.optim.optimizer import OffloadOptimizer
    from offload.storage import Tier
    from offload.streaming.shard import Shard
    from offload.telemetry.statistics import Meter

__all__ = ["OptimizerAccess"]


class OptimizerAccess:
    """A model, as far as an optimizer may use it."""

    def __init__(self, executor: Executor, tier: Tier, meter: Meter) -> None:
        self._executor = executor
        self._streamer = executor.streamer
        #: Where states rest, beside the parameters.
        self.tier = tier
        #: Counts what updates read and write.
        self.meter = meter

    @property
    def shards(self) -> list[Shard]:
        """The shards, in the order of a forward. An optimizer sets and takes away ``shard.pending``."""
        return self._executor.shards

    @property
    def device(self) -> torch.device:
        """Where layers compute."""
        return self._executor.device

    @property
    def updates_in_slot(self) -> bool:
        """Whether a shard that is read from a file is updated in the very slot that is filled for its next load."""
        return self.tier.blocking_io and self.device.type == "cpu"

    def add(self, optimizer: OffloadOptimizer) -> None:
        """Makes the optimizer a part of the model's steps, as long as it lives: see
        :class:`~offload.streaming.optimizers.Optimizers`.
        """
        self._streamer.gradient_offload.optimizers.add(optimizer)

    def spare_bytes(self) -> float:
        """Bytes that the model's memory budget leaves to an optimizer; infinite without a budget."""
        return self._executor.steps.spare_bytes()

    def reserve(self, optimizer: OffloadOptimizer, nbytes: int) -> None:
        """Takes the buffers of an optimizer out of the model's budget, as long as the optimizer lives."""
        self._executor.steps.reserve(optimizer, nbytes)

    def check_idle(self) -> None:
        """Raises RuntimeError in the middle of a forward or backward."""
        if self._executor.busy:
            raise RuntimeError("expected no forward or backward under way; a layer or a hook of the model stepped it")

    def apply_pending_updates(self) -> None:
        """Finishes all pending updates.

        Raises:
            OSError: if a home cannot be read or written. What could be done is done, the rest is still pending.
        """
        self._streamer.apply_pending_updates()

    def held_elsewhere(self, optimizer: OffloadOptimizer) -> bool:
        """Whether other code holds parameters of the optimizer, and can look at them past the model."""
        return self._executor.held_elsewhere(*self._streamer.gradient_offload.optimizers.references(optimizer))

    def store_assigned_data(self) -> None:
        """Copies what was assigned to the ``.data`` of parameters into their homes, which are about to be updated.

        Raises:
            ValueError: if something has another size than its parameter had.
        """
        self._executor.store_assigned_data()

    def commit(self, decide: Callable[[], None]) -> None:
        """Decides a step as a whole, whatever is raised in the middle of it.

        ``decide`` makes updates pending, and may be called again: if an interrupt cuts it short, it is called before
        anything reads or writes the homes.
        """

        def decided() -> None:
            decide()
            self._streamer.decide = None

        self._streamer.decide = decided
        try:
            decided()
        except BaseException:
            decided()
            raise
