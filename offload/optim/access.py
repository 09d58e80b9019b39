"""What the optimizers of a model may do with it, and what its steps take from them.

An optimizer that updates shards beside compute needs more of a model than its parameters. All of that passes through
:class:`OptimizerAccess`; :class:`Optimizers` is what the model knows of them.

Invariant: what an optimizer switches on ends with it. The model refers to optimizers weakly, and what they want of a
backward (norms, gradients that wait in memory, updates) is asked of those that are alive when it begins. An update that
is pending owns what it needs, so it is still applied.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from offload.planning.planner import Updates

if TYPE_CHECKING:
    import torch

    from offload.engine.executor import Executor
    from offload.optim.in_backward import InBackward
    from offload.optim.optimizer import OffloadOptimizer
    from offload.storage import Tier
    from offload.streaming.shard import Shard
    from offload.telemetry.statistics import Meter

__all__ = ["OptimizerAccess", "Optimizers"]


class Optimizers:
    """The optimizers of one model that are alive, and what they want of its steps."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[OffloadOptimizer] = weakref.WeakSet()

    def __iter__(self) -> Iterator[OffloadOptimizer]:
        """Each of them."""
        return iter(self._alive)

    def add(self, optimizer: OffloadOptimizer) -> None:
        """Adds one.

        Raises:
            ValueError: if it is to update in backward, and another one does already.
        """
        if optimizer.update_in_backward and self.in_backward is not None:
            raise ValueError("this model has an optimizer with update_in_backward=True already; use that one")
        self._alive.add(optimizer)

    @property
    def in_backward(self) -> InBackward | None:
        """What updates shards during backward."""
        return next((o.in_backward for o in self if o.in_backward is not None), None)

    @property
    def clip(self) -> bool:
        """Whether the norm of each gradient is wanted."""
        return any(o.max_norm is not None for o in self)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that may wait in host memory for their update, where homes are on disk."""
        return max((o.gradient_bytes for o in self), default=0)

    def planned(self) -> Updates:
        """The arguments of :func:`~offload.planning.planner.plan_step` that optimizers decide."""
        return {
            "pending": frozenset[int]().union(*(o.updated_shards for o in self if not o.update_in_backward)),
            "updates": any(o.update_in_backward for o in self),
            "clips": self.clip,
        }

    def references(self, optimizer: OffloadOptimizer) -> tuple[Counter[nn.Parameter], Counter[int]]:
        """References of all optimizers to the parameters of one of them, and to the home of each shard by its index."""
        known = Counter(p for group in optimizer.param_groups for p in group["params"])
        views: Counter[int] = Counter()
        for other in self:
            if other is not optimizer:
                known.update(p for group in other.param_groups for p in group["params"] if p in known)
            known.update(p for p in other.state if p in known)
            for shard, pieces in other.param_blocks.items():
                views[shard.index] += sum(len(piece.proxies) for piece in pieces)
        return known, views


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
        """Makes the optimizer a part of the model's steps, as long as it lives: see :class:`Optimizers`."""
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
