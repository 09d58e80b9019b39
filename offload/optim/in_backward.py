"""Updates in backward: a shard is updated as soon as its gradients are complete, which then never rest anywhere.

The shards that backward has left are updated while it goes on with those before them. The price is that nothing may
come in between: a second backward of the same step, or another forward whose backward is still to come, would meet
parameters that have changed already. So both are refused before anything happens, unless they are marked.

After a backward that failed with some shards updated and others not, the optimizer is dead and says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offload.streaming.lane import Arrival
from offload.streaming.shard import Shard, Slice

if TYPE_CHECKING:
    from offload.optim.optimizer import OffloadOptimizer

__all__ = ["InBackward"]


class InBackward:
    """What the streamer asks while a backward brings gradients. Made for one optimizer."""

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        # They belong together. A cycle would keep an optimizer alive that all other code has forgotten.
        self._optimizer = weakref.ref(optimizer)
        self.accumulating = 0
        self._updated: list[int] | None = None  # shards that this step has updated; None between steps
        #: The optimizer while a backward updates: it must not go between a gradient that was kept and its update.
        self._updating: OffloadOptimizer | None = None
        self._dead: str | None = None
        self._options: list[dict[str, Any]] = []

    @property
    def updates(self) -> bool:
        """Whether the next backward is to update shards."""
        return not self.accumulating

    def check(self) -> None:
        """Raises if a backward failed after it had updated a shard."""
        if self._dead is not None:
            raise RuntimeError(self._dead)

    def close(self) -> None:
        """The step is over: the next backward updates again."""
        self._updated = None

    def begin(self, waiting: int) -> bool:
        """A backward begins, and ``waiting`` other forwards still wait for theirs; says whether it will update."""
        optimizer = self._optimizer()
        if optimizer is None or self.accumulating:
            return False
        self.check()
        if self._updated is not None:
            raise RuntimeError(
                "a second backward before step(): the first has updated the parameters already. Run all backwards of a "
                "step but the last under `with optimizer.accumulate():`, and call step() after the last"
            )
        if waiting:
            raise RuntimeError(
                f"{waiting} more forwards of this model wait for their backward, and this backward would change the "
                f"parameters under them; run it under `with optimizer.accumulate():`, or delete their outputs"
            )
        self._updating, self._updated, self._options = optimizer, [], optimizer.options()
        return True

    def keep(self, shard: Shard, gradients: list[Tensor | None]) -> dict[Slice, Tensor]:
        """Takes those gradients of a visit that are complete and need not go home."""
        optimizer = self._updating
        if optimizer is None:
            return {}
        ours = {s for param_block in optimizer.param_blocks[shard] for s in param_block.slices}
        kept = {}
        for position, s in enumerate(shard.own):
            gradient = gradients[position]
            # What rests at home already, from a tied layer or an earlier backward, is added to there.
            if s in ours and gradient is not None and s.parameter.grad is None:
                kept[s] = gradient
                gradients[position] = None
        return kept

    def complete(self, shard: Shard, kept: dict[Slice, Tensor], after: Sequence[Arrival]) -> Arrival | None:
        """All gradients of a shard are in: it is updated, beside the backward of the shards before it."""
        optimizer = self._updating
        if optimizer is None:
            return None
        update = optimizer.update(shard, self._options, kept=kept)
        if update is None:
            return None
        assert self._updated is not None
        self._updated.append(shard.index)  # first: an interrupt in between must not make this look untouched
        update.letter = "V"
        optimizer.mark(shard, update)
        for param_block in optimizer.param_blocks[shard]:
            for parameter in param_block.parameters:
                parameter.grad = None
        return update.start(after=after)

    def end(self, *, failed: bool = False) -> None:
        """The backward is over."""
        if self._updating is not None and failed:
            if self._updated:
                self._dead = (
                    f"a backward failed after it had updated the shards {self._updated} and before it could update the "
                    f"others; make model and optimizer anew and load the last checkpoint"
                )
            self._updated = None
        self._updating = None
