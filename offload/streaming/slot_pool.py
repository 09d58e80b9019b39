"""A pool of equal device buffers (slots) that hold loaded shards, of one model or of models that compute in turns.

A shard that is larger than a slot gets a buffer of its own, which is freed when the shard is evicted.

Models that never compute at the same time can share slots: the computing model acquires them, and the others evict
their shards, least recently used model first. So a device holds the slots of one turn, and one more for the next turn,
whatever the number of models.

Guarantees
    * A computing model never loses a slot, and gets as many as it has when alone.
    * Memory is allocated once, at first use.

Assumes that the models of a pool compute one at a time; two at once raise an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from offload.storage.buffer import device_buffer
from offload.telemetry.statistics import Meter
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses


class SlotUser(Protocol):
    """What uses slots: the streamer of a model."""

    @property
    def shards(self) -> Sequence[Any]:
        """Those of the model."""

    @property
    def device(self) -> torch.device:
        """Where its slots are."""

    @property
    def most_slots(self) -> int:
        """Slots that it may use."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of its largest shard in a slot."""

    @property
    def backward_order(self) -> Sequence[int]:
        """The shards, last first."""

    def in_pass(self) -> bool:
        """Whether a pass is running."""

    def evict_one(self) -> bool:
        """Evicts a shard that is not used; returns whether there was one."""

    def reset(self) -> None:
        """Resets all state after a failure."""

    def prefetch(self, order: Sequence[int]) -> None:
        """Starts to load shards in this order."""

    def use_slots(self, slot_pool: SlotPool) -> None:
        """Computes in slots of this pool from now on."""


__all__ = ["SlotPool", "share_slots"]


class SlotPool:
    """Equal slots of ``slot_bytes`` on a device.

    ``slot_users``: of models that share them, in the order of their forward turns; empty for one model alone.
    """

    def __init__(self, device: torch.device, slots: int, slot_bytes: int, slot_users: Sequence[SlotUser] = ()) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._device = device
        self.slot_users = list(slot_users)
        self._recent = list(slot_users)  # least recently used first
        self._computing: SlotUser | None = None
        self._all: list[Tensor] = []
        self._free: list[Tensor] | None = None
        #: Buffers of single shards by their identity, with the meter that counts each.
        self._own: dict[int, tuple[Tensor, Meter]] = {}
        self._meter: Meter | None = None
        #: References to each slot that the engine made, by its identity.
        self._views: dict[int, int] = {}

    @property
    def shared(self) -> bool:
        """Whether models share the pool."""
        return bool(self.slot_users)

    @contextlib.contextmanager
    def turn(self, slot_user: SlotUser) -> Iterator[None]:
        """``slot_user`` computes inside the context. Raises RuntimeError if another one computes."""
        if not self.shared:
            yield
            return
        # An interrupt at the end of a turn leaves a user here that does not compute.
        before = self._computing
        if before not in (None, slot_user) and before.in_pass():
            raise RuntimeError("two models that take turns on one device compute at once; do not share their slots")
        try:
            self.computes(slot_user)
            yield
        finally:
            self._computing = before

    def computes(self, slot_user: SlotUser) -> None:
        """Called when ``slot_user`` computes next, where models share the pool."""
        self._computing = slot_user
        if self._recent[-1] is not slot_user:
            self._recent = [*(other for other in self._recent if other is not slot_user), slot_user]

    def acquire_slot(self, meter: Meter, nbytes: int) -> Tensor:
        """Acquires a slot for a shard of the computing model; for one that is larger than a slot, a buffer of its own.

        The buffer is freed when it is released.
        """
        if nbytes > self.slot_bytes:
            with outside_inference_mode():
                own = device_buffer(nbytes, self._device)
            meter.hold(nbytes)
            self._own[id(own)] = own, meter
            return own
        if self._free is None:
            # Without this, slots allocated inside inference mode could never be filled outside it.
            with outside_inference_mode():
                self._all = [device_buffer(self.slot_bytes, self._device) for _ in range(self.slots)]
            self._free = list(self._all)
            meter.hold(self.slots * self.slot_bytes)
            self._meter = meter
        while not self._free and any(other.evict_one() for other in self._recent if other is not self._computing):
            pass
        return self._free.pop()

    def acquire_unneeded(self, slot_user: SlotUser) -> Tensor | None:
        """Acquires a slot that the current turn does not need, for a prefetch; None if there is none."""
        if self._free is None:
            return None
        while not self._free and any(other.evict_one() for other in self._recent[:-1] if other is not slot_user):
            pass
        return self._free.pop() if self._free else None

    def count_views(self, slot: Tensor, count: int) -> None:
        """Records ``count`` references to a slot that the engine itself created."""
        self._views[id(slot)] = self._views.get(id(slot), 0) + count

    def is_referenced(self, slot: Tensor) -> bool:
        """Whether a slot's storage has references that the engine did not create."""
        return storage_uses(slot) > 1 + self._views.get(id(slot), 0)

    def replace(self, slot: Tensor) -> Tensor:
        """Allocates a new slot in place of one that is still referenced. A shard's own buffer is not used again."""
        if id(slot) in self._own:
            return slot
        with outside_inference_mode():
            new = device_buffer(slot.numel(), self._device)
        self._all = [new if old is slot else old for old in self._all]
        self._views.pop(id(slot), None)
        return new

    def release(self, slot: Tensor, *, last: bool = False) -> None:
        """Returns a slot; ``last``: others are acquired before it, since an update still writes to it."""
        if id(slot) in self._own:
            self._views.pop(id(slot), None)
            self._own.pop(id(slot))[1].release(slot.numel())
            return
        assert self._free is not None
        self._free.insert(0 if last else len(self._free), slot)

    def _free_own(self) -> None:
        """Frees buffers that belong to one shard, which is larger than a slot."""
        for slot, _ in list(self._own.values()):
            self.release(slot)

    def resize(self, slots: int, slot_bytes: int) -> None:
        """Changes number and size of the slots, while all are free; they are allocated at their next use."""
        if (slots, slot_bytes) != (self.slots, self.slot_bytes):
            self.free_memory()
            self.slots, self.slot_bytes = slots, slot_bytes

    def free_memory(self) -> None:
        """Frees all memory, when the only model of the pool moves to another one, or needs other slots."""
        self._free_own()
        if self._meter is not None:
            self._meter.release(self.slots * self.slot_bytes)
        self._free = self._meter = None
        self._all = []
        self._views.clear()

    def reset(self) -> None:
        """Marks all slots as free, after a failure, once no user has one."""
        self._free_own()
        if self._free is not None:
            for slot in self._all:
                if self.is_referenced(slot):  # an exception's frames may hold views
                    self.replace(slot)
            self._free = list(self._all)

    def prefetch_previous(self, slot_user: SlotUser) -> None:
        """Lets the model whose backward turn is next prefetch."""
        if self.slot_users and self.slot_users[0] is not slot_user:
            following = self.slot_users[self.slot_users.index(slot_user) - 1]
            following.prefetch(following.backward_order)


def share_slots(stages: Sequence[Sequence[SlotUser]]) -> None:
    """Gives streamers of one device a common pool: those of a stage compute together, stages in turns.

    Its size is that of the largest turn, plus one slot for the next turn if that turn holds all its shards.
    """
    streamers = [streamer for stage in stages for streamer in stage]
    slots = 0
    for stage in stages:
        held = sum(streamer.most_slots for streamer in stage)
        keeps_all = held == sum(len(streamer.shards) for streamer in stage)
        slots = max(slots, held + (keeps_all and len(stages) > 1))
    slot_bytes = max(streamer.slot_bytes for streamer in streamers)
    slot_pool = SlotPool(streamers[0].device, slots, slot_bytes, streamers)
    for streamer in streamers:
        streamer.use_slots(slot_pool)
