"""The live optimizers of one model, and what its passes must do for them: norms, updates, memory for gradients.

The model refers to them weakly, so the effect of an optimizer ends with its lifetime.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator

from torch import nn

from offload.planning.step_model import Updates
from offload.streaming.contract import ModelOptimizer, UpdaterInBackward

__all__ = ["Optimizers"]


class Optimizers:
    """The live optimizers of one model, and what they need of its steps."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[ModelOptimizer] = weakref.WeakSet()
        #: How many backwards have begun that add to stored gradients.
        self.backwards = 0

    def __iter__(self) -> Iterator[ModelOptimizer]:
        """Iterates over the live optimizers."""
        return iter(self._alive)

    def add(self, optimizer: ModelOptimizer) -> None:
        """Registers an optimizer. Raises ValueError if two would update in backward."""
        if optimizer.in_backward is not None and self.in_backward is not None:
            raise ValueError("this model has an optimizer with update_in_backward=True already; use that one")
        self._alive.add(optimizer)

    @property
    def in_backward(self) -> UpdaterInBackward | None:
        """The object that updates shards during backward; None if no optimizer does so."""
        return next((o.in_backward for o in self if o.in_backward is not None), None)

    @property
    def clip(self) -> bool:
        """Whether an optimizer needs the norm of each gradient."""
        return any(o.max_norm is not None for o in self)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that may be kept in host memory until their update, where homes are on disk."""
        return max((o.gradient_bytes for o in self), default=0)

    def awaits_states(self) -> bool:
        """Whether an optimizer did not step yet: how many bytes its states take is unknown."""
        return any(optimizer.steps == 0 for optimizer in self)

    def resident_state_bytes(self) -> int:
        """Bytes of the states of parameters that belong to no shard."""
        return sum(optimizer.resident_state_bytes() for optimizer in self)

    def buffer_bytes(self, spare_bytes: float | None = None) -> int:
        """Bytes of all buffers of updates in files, or if each optimizer could take ``spare_bytes``."""
        return sum(optimizer.buffer_bytes(spare_bytes) for optimizer in self)

    def planned(self) -> Updates:
        """What optimizers add to the plan of a step."""
        pending = frozenset[int]().union(*(o.updated_shards for o in self if o.in_backward is None))
        return Updates(pending, self.in_backward is not None)

    def references(self, optimizer: ModelOptimizer) -> Counter[nn.Parameter]:
        """References of all optimizers to the parameters of one of them."""
        known = Counter(p for group in optimizer.param_groups for p in group["params"])
        for other in self:
            if other is not optimizer:
                known.update(p for group in other.param_groups for p in group["params"] if p in known)
            known.update(p for p in other.state if p in known)
        return known
