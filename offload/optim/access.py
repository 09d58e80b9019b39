"""The interface of a model for its optimizers, besides its parameters.

What the model knows of its optimizers is in :mod:`offload.streaming.optimizers`.

Invariant: the effect of an optimizer ends with its lifetime. The model refers to optimizers weakly, and asks those that
are alive at the beginning of a backward what they need of it (norms, gradients kept in memory, updates). A pending
update owns its gradients and states, so it is applied even if its optimizer is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.engine.homes import ModelHomes
    from offload.streaming.contract import ModelOptimizer

__all__ = ["OptimizerAccess"]


class OptimizerAccess:
    """The part of a model that its optimizers may use."""

    def __init__(self, homes: ModelHomes) -> None:
        self._homes = homes
        self._streamer = homes.streamer
        #: In the order of a forward. An optimizer sets and clears ``shard.pending``.
        self.shards = homes.shards
        #: Parameters that stay on the compute device.
        self.resident = list(homes.outside)
        if homes.resident is not None:
            self.resident += [s.parameter for s in homes.resident.own]
        #: The compute device.
        self.device = homes.device
        #: Storage of the states where shards rest at home, the same as that of the parameters.
        self.tier = homes.tier
        #: Which parameters users see, and what of them is stored.
        self.public = homes.public
        #: Counts the bytes that updates read and write.
        self.meter = homes.meter

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that may wait in host memory until their update, where homes are on disk."""
        return self._homes.policy.gradient_bytes or 0

    def add(self, optimizer: ModelOptimizer) -> None:
        """Registers the optimizer with the model, by a weak reference: see :mod:`offload.streaming.optimizers`."""
        self.public.check_optimizer(optimizer)
        self._streamer.gradient_offload.optimizers.add(optimizer)

    @property
    def backwards(self) -> int:
        """How many backwards have added to gradients, or have begun to."""
        return self._streamer.gradient_offload.optimizers.backwards

    def spare_bytes(self) -> float:
        """Bytes that the model's memory leaves to an optimizer; infinite without a limit."""
        return self._homes.steps.spare_bytes()

    def reserve(self, optimizer: object, nbytes: int) -> None:
        """Notes the bytes of buffers of an optimizer, as long as the optimizer lives."""
        self._homes.steps.reserve(optimizer, nbytes)

    def check_idle(self) -> None:
        """Raises RuntimeError during a forward or backward."""
        if self._homes.busy:
            raise RuntimeError(
                "expected no running forward or backward, but a layer or a hook called the optimizer; call it later"
            )

    def apply_pending_updates(self) -> None:
        """Finishes all pending updates. After an OSError completed ones stay done, the others pending."""
        self._streamer.apply_pending_updates()

    def write_back(self) -> None:
        """Writes weights that rest in memory to their files, if these are kept."""
        if self.tier.keeps:
            self._homes.write_back()

    def held_elsewhere(self, optimizer: ModelOptimizer) -> bool:
        """Whether other code holds parameters of the optimizer, and so can read them without asking the model."""
        references = self._streamer.gradient_offload.optimizers.references(optimizer)
        held = self.public.held_elsewhere(*references)
        return self._homes.references.held_elsewhere(*references) if held is None else held

    @property
    def at_once(self) -> bool:
        """Whether updates run in ``step()``."""
        return self._streamer.updates_at_once

    def store_assigned_data(self) -> None:
        """Copies tensors assigned to ``.data`` of parameters into their homes. Raises ValueError for another size."""
        self._homes.assigned_data.store()

    def commit(self, decide: Callable[[], None]) -> None:
        """Makes all updates of a step pending, even if an exception interrupts it.

        ``decide``, which is idempotent, makes them pending; after an interrupt it is called again before homes are
        used.
        """

        def decided() -> None:
            decide()
            self._streamer.finish_step = None

        self._streamer.finish_step = decided
        try:
            decided()
        except BaseException:
            decided()
            raise
