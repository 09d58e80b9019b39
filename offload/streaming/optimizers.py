"""The live optimizers of one model, and what its passes must do for them: norms, updates, memory for gradients.

The model refers to them weakly, so the effect of an optimizer ends with its lifetime.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from offload.planning.step_model import Updates
from offload.storage import Tier
from offload.streaming.contract import PendingUpdate
from offload.streaming.lane import Arrival
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = ["InBackward", "ModelOptimizer", "Optimizers"]


class ModelOptimizer(Protocol):
    """An optimizer that a model knows."""

    param_groups: list[dict[str, Any]]
    max_norm: float | None
    #: So far.
    steps: int
    #: Of each parameter.
    state: Any
    #: Of each shard.
    param_blocks: dict[Any, Any]
    #: What updates during backward.
    in_backward: InBackward | None
    #: The class of optimizers, its arguments, and the form in which states are stored.
    factory: Any

    @property
    def updated_shards(self) -> frozenset[int]:
        """Shards that a step updates."""

    def options(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group."""

    def check_unedited(self) -> None:
        """Raises RuntimeError if users changed states, or members of groups, since the optimizer took them over."""

    def update(self, shard: Any, options: list[dict[str, Any]], *, kept: dict[Slice, Tensor]) -> PendingUpdate | None:
        """The update of a shard from its stored gradients and the ``kept`` ones; None if it has no gradient."""

    def resident_state_bytes(self) -> int:
        """Bytes of the states of parameters that belong to no shard."""

    def state_bytes(self, shard: Any) -> int:
        """Bytes of the states of a shard."""

    def states_in_use(self, shard: Any) -> bool:
        """Whether other code holds states of a shard."""

    def prepare_move(self, shard: Any, tier: Tier) -> tuple[list[tuple[Tensor, Tensor]], Callable[[], None]]:
        """Copies the states of a shard to where it will rest; returns what makes the copies count."""

    def reserve_buffers(self) -> None:
        """Notes the bytes of buffers that updates in files need now."""

    def buffer_bytes(self, spare_bytes: float | None = None) -> int:
        """Bytes of all buffers of updates in files."""


class InBackward:
    """Updates a shard in backward, as soon as its gradients are complete; they are never stored. Of one optimizer.

    A shard is updated while backward computes those before it. The price: a second backward of the same step, or
    another forward that still needs its backward, would compute with parameters that have changed already. Both are
    refused before anything changes, except under ``accumulate()``.

    After a backward that failed with some shards updated and others not, every call of the optimizer raises.
    """

    def __init__(self, optimizer: ModelOptimizer) -> None:
        # Weak: a cycle would keep an optimizer alive that no other code refers to.
        self._optimizer = weakref.ref(optimizer)
        #: How many contexts defer the update to a later backward.
        self.accumulating = 0
        self._updated: list[int] | None = None  # shards that this step has updated; None between steps
        #: The optimizer while a backward updates: it must not be collected between a kept gradient and its update.
        self._updating: ModelOptimizer | None = None
        self._failure: str | None = None
        self._options: list[dict[str, Any]] = []

    def check(self) -> None:
        """Raises if a backward failed after it had updated a shard."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @property
    def has_updated(self) -> bool:
        """Whether a backward has updated since the last ``step()``."""
        return self._updated is not None

    def fail(self, why: str) -> None:
        """Raises RuntimeError, as every later :meth:`check` does."""
        self._failure = why
        self.check()

    def close(self) -> None:
        """Ends the step: the next backward updates again."""
        self._updated = None

    def options_of_step(self, written: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A copy of the hyperparameters of all groups, for the updates of ``step()`` itself.

        It is without what the class has ``written`` into its groups in this step's backward, such as a count of steps:
        one step writes it once.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        now = optimizer.options()
        if self._updated is None:
            return now
        # The same list: updates of one step have one.
        self._options += now[len(self._options) :]
        for index, group in enumerate(now):
            self._options[index].update((k, v) for k, v in group.items() if k not in written.get(index, {}))
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
        if not any(shard.pending for shard in optimizer.param_blocks):
            optimizer.check_unedited()
        shards = [*optimizer.param_blocks]
        calls = range(len(shards)) if order is None else order
        used = {j: place for place, j in reversed([*enumerate(calls)])}  # the first of several
        for shard in shards:
            at = used.get(shard.index, -1)
            late = [s.name for owner, s in shard.borrowed if not owner.resident and used.get(owner.index, -1) > at >= 0]
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
        assert optimizer is not None
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
        assert optimizer is not None
        assert self._updated is not None
        if (update := optimizer.update(shard, self._options, kept=kept)) is None:
            return None
        self._updated.append(shard.index)  # first: after an interrupt the shard counts as updated
        update.make_pending()
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
    def in_backward(self) -> InBackward | None:
        """The object that updates shards during backward; None if no optimizer does so."""
        return next((o.in_backward for o in self if o.in_backward is not None), None)

    @property
    def clip(self) -> bool:
        """Whether an optimizer needs the norm of each gradient."""
        return any(o.max_norm is not None for o in self)

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
            known.update(p for p in vars(other)["state"] if p in known)  # which finishes no update
        return known
