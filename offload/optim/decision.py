"""Decides a step of an ``OffloadOptimizer``: the updates of all shards become pending together, or none does.

Some updates run at once: those of parameters that stay on the compute device, and those with sparse gradients, which
most classes refuse. If one fails after another has begun, the step is decided all the same.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from offload.optim.update import Update
from offload.streaming.formed_weights import seal
from offload.streaming.grad_norm import detach_norm
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

if TYPE_CHECKING:
    from offload.optim.access import OptimizerAccess
    from offload.optim.param_block import ParamBlock, UpdateJob

__all__ = ["StepDecision", "Stepping", "mark", "note_update"]


def note_update(job: UpdateJob) -> None:
    """Increments the version of the parameters that an update writes, also for kernels that do not."""
    found = zip(job.param_block.parameters, job.gradients, strict=True)
    written = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
    if job.coefficient is not None:
        for _, gradient in written:
            # Without this, a clipped gradient that is not zeroed would keep its norm from before.
            detach_norm(gradient)
    torch.autograd.graph.increment_version([parameter for parameter, _ in written])


def mark(shard: Shard, update: Update) -> None:
    """Makes an update pending. Increments the version of its parameters, although they are written later."""
    for job in update.tasks:
        note_update(job)
    if shard.formed:
        seal(shard)
    shard.pending = update


class Stepping(Protocol):
    """What a step needs of its optimizer."""

    access: OptimizerAccess
    param_groups: list[dict[str, Any]]
    param_blocks: dict[Shard, list[ParamBlock]]

    @property
    def steps(self) -> int:
        """Steps so far."""

    def count_step(self, number: int) -> None:
        """Notes that a step of this number is decided."""

    def options(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group."""

    def update(
        self,
        shard: Shard,
        options: list[dict[str, Any]],
        coefficient: Tensor | None = None,
        kept: dict[Slice, Tensor] | None = None,
    ) -> Update | None:
        """The update of a shard; None if it has no gradient."""


class StepDecision:
    """One step of an optimizer.

    Args:
        optimizer: whose step it is.
        updates: of the shards that have a gradient, in the order of loads.
        resident: the updates of parameters that stay on the compute device.
        run_resident: runs those that are not done.
        options: the hyperparameters of all groups.
    """

    def __init__(
        self,
        optimizer: Stepping,
        updates: Sequence[tuple[Shard, Update]],
        resident: Sequence[UpdateJob],
        run_resident: Callable[[], None],
        options: list[dict[str, Any]],
    ) -> None:
        self._optimizer = optimizer
        self._updates = updates
        self._resident = resident
        self._run_resident = run_resident
        #: The number of this step, from 1 on.
        self.number = optimizer.steps + 1
        self.options = options
        self._backwards = optimizer.access.backwards
        #: Those of all parameters when the step raised; weakly, since zero_grad() frees them.
        self._gradients: list[tuple[Any, Callable[[], Tensor | None]]] = []

    def run_at_once(self) -> None:
        """Runs the updates that do not become pending. Raises what they raise."""
        for shard, update in self._updates:
            if not any(job.sparse for job in update.tasks):
                continue
            mark(shard, update)
            try:
                update.start().synchronize()
            except Exception:
                if not self.begun:
                    update.withdraw()
                raise
        self._run_resident()

    @property
    def begun(self) -> bool:
        """Whether anything is applied yet."""
        begun = any(job.done or job.scaled or job.param_block.stopped for job in self._resident)
        return begun or not all(update.unapplied or update.withdrawn for _, update in self._updates)

    @property
    def done(self) -> bool:
        """Whether all of it is applied."""
        return all(job.done for job in self._resident) and all(update.done for _, update in self._updates)

    def decide(self) -> None:
        """Makes all updates pending. Idempotent, for a second call after an exception in the first."""
        self._run_resident()
        for shard, update in self._updates:
            if shard.pending is not update and not (update.done or update.withdrawn):
                mark(shard, update)
        # The next forward loads the shards in their order.
        for (_, update), (_, following) in itertools.pairwise(self._updates):
            update.following = following
        self._optimizer.count_step(self.number)

    def note_gradients(self) -> None:
        """Called when the step has raised."""
        members = (p for group in self._optimizer.param_groups for p in group["params"])
        self._gradients = [(p, weakref.ref(p.grad)) for p in members if p.grad is not None]

    def repeats(self) -> bool:
        """Whether a call of ``step()`` repeats this one, which raised: no backward came between, and no gradient was
        replaced or removed."""
        if self._optimizer.access.backwards != self._backwards:
            return False
        return all(parameter.grad is gradient() for parameter, gradient in self._gradients)

    def start(self) -> None:
        """Starts the updates that need not wait for a load: homes in host memory are updated in place."""
        for shard, update in self._updates:
            if not (shard.blocking_io or update.done):
                update.start()
