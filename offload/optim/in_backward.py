"""Optimizer updates during backward: a shard is updated as soon as its gradients are complete; they are never stored.

A shard is updated while backward computes those before it. The price: a second backward of the same step, or another
forward that still needs its backward, would compute with parameters that have changed already. Both are refused before
anything changes, except under ``accumulate()``.

After a backward that failed with some shards updated and others not, every call of the optimizer raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offload.optim.decision import Stepping, mark
from offload.optim.groups import GroupChanges
from offload.streaming.lane import Arrival
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = ["InBackward"]


class InBackward:
    """The updater that the gradient offload calls during a backward. Belongs to one optimizer."""

    def __init__(self, optimizer: Stepping) -> None:
        # Weak: a cycle would keep an optimizer alive that no other code refers to.
        self._optimizer = weakref.ref(optimizer)
        self.accumulating = 0
        self._updated: list[int] | None = None  # shards that this step has updated; None between steps
        #: The optimizer while a backward updates: it must not be collected between a kept gradient and its update.
        self._updating: Stepping | None = None
        self._failure: str | None = None
        self._options: list[dict[str, Any]] = []

    @property
    def updates(self) -> bool:
        """Whether the next backward updates shards."""
        return not self.accumulating

    def check(self) -> None:
        """Raises if a backward failed after it had updated a shard."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def close(self) -> None:
        """Ends the step: the next backward updates again."""
        self._updated = None

    def options_of_step(self, changes: GroupChanges) -> list[dict[str, Any]]:
        """A copy of the hyperparameters of all groups, for the updates of ``step()`` itself.

        It is without what the class wrote into its groups in this step's backward, such as a count of steps: one step
        writes it once.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        now = optimizer.options()
        if self._updated is None:
            return now
        # The same list: updates of one step have one.
        self._options += now[len(self._options) :]
        for index, group in enumerate(now):
            self._options[index].update((k, v) for k, v in group.items() if k not in changes.of(index))
        return self._options

    def begin(self, waiting: int, order: Sequence[int] | None = None) -> bool:
        """Begins a backward while ``waiting`` other forwards still need theirs; returns whether it will update.

        ``order``: the shards in the order in which the forward used them; None: that of their numbers.
        """
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
                f"{waiting} more forwards of this model still need their backward, but this one changes parameters; "
                f"run it under `with optimizer.accumulate():`, or delete their outputs"
            )
        shards = optimizer.access.shards
        used: dict[int, int] = {}
        for place, j in enumerate(range(len(shards)) if order is None else order):
            used.setdefault(j, place)
        for shard in shards:
            at = used.get(shard.index, -1)
            late = [s.name for owner, s in shard.loans if not owner.resident and used.get(owner.index, -1) > at >= 0]
            if late:
                raise RuntimeError(
                    f"parameter {late[0]} is tied, and stored with a block that the forward calls after another one "
                    f"that uses it: an update in backward would come before all of its gradient is known; pass "
                    f"update_in_backward=False, or name the blocks in the order of calls"
                )
        self._updating, self._updated, self._options = optimizer, [], optimizer.options()
        return True

    def keep(self, shard: Shard, gradients: list[Tensor | None]) -> dict[Slice, Tensor]:
        """Takes the gradients of a shard's visit that are complete and need not be stored."""
        optimizer = self._updating
        if optimizer is None:
            return {}
        ours = {s for param_block in optimizer.param_blocks[shard] for s in param_block.slices}
        kept = {}
        for position, s in enumerate(shard.own):
            gradient = gradients[position]
            # A stored gradient, of a tied layer or an earlier backward, must be added to.
            if s in ours and gradient is not None and s.parameter.grad is None:
                kept[s] = gradient
                gradients[position] = None
        return kept

    def complete(
        self, shard: Shard, kept: dict[Slice, Tensor], slot: Tensor | None, after: Sequence[Arrival]
    ) -> Arrival | None:
        """Starts the update of a shard whose gradients are all computed; backward of the shards before it goes on.

        ``slot`` holds its weights, which are updated there; None: they are read again.
        """
        optimizer = self._updating
        if optimizer is None:
            return None
        update = optimizer.update(shard, self._options, kept=kept)
        if update is None:
            return None
        assert self._updated is not None
        self._updated.append(shard.index)  # first: after an interrupt the shard counts as updated
        update.letter = "V"
        mark(shard, update)
        for param_block in optimizer.param_blocks[shard]:
            for parameter in param_block.parameters:
                parameter.grad = None
        return update.start(slot, after=after, holds=True)

    def end(self, *, failed: bool = False) -> None:
        """Ends the backward."""
        if self._updating is not None and failed:
            if self._updated:
                self._failure = (
                    f"a backward failed after it had updated the shards {self._updated} and before it could update the "
                    f"others; make model and optimizer anew and load the last checkpoint"
                )
            self._updated = None
        self._updating = None
