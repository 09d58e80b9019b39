"""The optimizers of one model that are alive, and what they ask of its passes: norms, updates, memory for gradients.

The model refers to them weakly, so what an optimizer switched on ends with it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from offload.planning.planner import Updates

if TYPE_CHECKING:
    from offload.optim.in_backward import InBackward
    from offload.optim.optimizer import OffloadOptimizer

__all__ = ["Optimizers"]


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
