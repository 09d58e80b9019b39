"""Room: the slots on a device, of one model or of several that take turns there.

Models that never compute at the same moment need not have slots of their own. Told so, they share a room: whoever
computes takes slots, and a model that does not compute gives up what it left there, the least recently used first. So
a device holds the slots of one turn, and one more for the turn that comes next, whatever the number of models.

Guarantees
    * A model that computes never loses a slot, and gets as many as it has when alone.
    * Memory is taken at the first use, once.

Assumes that models of a room compute one at a time; two at the same moment are an error, not a race.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from offload.storage.buffer import device_buffer
from offload.telemetry.statistics import Meter
from pipe.torch_private import storage_uses

__all__ = ["SlotPool", "SlotUser"]


class SlotUser(Protocol):
    """Who holds slots."""

    @property
    def computes(self) -> Callable[[], bool]:
        """Tells whether it is in the middle of a pass."""
        ...

    def reset(self) -> None:
        """After a failure: waits for its copies in flight and forgets its slots."""
        ...

    def evict_one(self) -> bool:
        """Drops a shard that it does not compute with, so that its slot is free; False if there is none."""
        ...

    def prefetch(self, order: Sequence[int]) -> None:
        """Begins to load shards, in this order, as far as there is room that nobody needs."""
        ...

    @property
    def backward_order(self) -> Sequence[int]:
        """The order in which a backward uses its shards."""
        ...


class SlotPool:
    """Slots of equal size.

    Args:
        device: where they are.
        slots: their number.
        slot_bytes: size of each.
        tenants: who shares them, in the order of their turns forward; empty for a room of one model.
    """

    def __init__(self, device: torch.device, slots: int, slot_bytes: int, slot_users: Sequence[SlotUser] = ()) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._device = device
        self.slot_users = list(slot_users)
        self._recent = list(slot_users)  # least recently used first
        self._computing: SlotUser | None = None
        self._made: list[Tensor] = []
        self._free: list[Tensor] | None = None
        self._meter: Meter | None = None
        self._views = WeakTensorKeyDictionary()

    @property
    def shared(self) -> bool:
        """Whether models take turns here."""
        return bool(self.slot_users)

    @contextlib.contextmanager
    def turn(self, slot_user: SlotUser) -> Iterator[None]:
        """Inside, ``slot_user`` computes.

        Raises:
            RuntimeError: if another one does.
        """
        if not self.shared:
            yield
            return
        # One that does not compute was interrupted as its turn ended.
        if self._computing is not None and self._computing.computes():
            raise RuntimeError("two models that take turns on one device compute at once; give each a room of its own")
        try:
            self._computing = slot_user
            self._recent = [*(other for other in self._recent if other is not slot_user), slot_user]
            yield
        finally:
            self._computing = None

    def take(self, meter: Meter) -> Tensor:
        """A slot, for the model that computes."""
        if self._free is None:
            # Without this, slots made by a first call inside inference mode could never be filled outside it.
            with torch.inference_mode(False):
                self._made = [device_buffer(self.slot_bytes, self._device) for _ in range(self.slots)]
            self._free = list(self._made)
            meter.hold(self.slots * self.slot_bytes)
            self._meter = meter
        while not self._free and any(other.evict_one() for other in self._recent if other is not self._computing):
            pass
        return self._free.pop()

    def spare(self, slot_user: SlotUser) -> Tensor | None:
        """A slot that is of no use to the turn under way, for one that looks ahead; None if there is none."""
        if self._free is None:
            return None
        while not self._free and any(other.evict_one() for other in self._recent[:-1] if other is not slot_user):
            pass
        return self._free.pop() if self._free else None

    def note_views(self, slot: Tensor, count: int) -> None:
        """To be called when the engine has made views of a slot, to be used whenever a shard is there."""
        self._views[slot] = self._views.get(slot, 0) + count

    def is_lent(self, slot: Tensor) -> bool:
        """Whether tensors that the engine did not make look at a slot."""
        return storage_uses(slot) > 1 + int(self._views.get(slot, 0))

    def replace(self, slot: Tensor) -> Tensor:
        """A new slot in place of one that is left to who looks at it."""
        with torch.inference_mode(False):
            new = device_buffer(slot.numel(), self._device)
        self._made = [new if made is slot else made for made in self._made]
        return new

    def release(self, slot: Tensor) -> None:
        """Gives a slot back."""
        assert self._free is not None
        self._free.append(slot)

    def leave(self) -> None:
        """To be called when the only model of a room goes elsewhere: its memory is free."""
        if self._meter is not None:
            self._meter.release(self.slots * self.slot_bytes)
        self._free = self._meter = None
        self._made = []

    def reset(self) -> None:
        """After a failure, when no tenant has a slot any more: all are free."""
        if self._free is not None:
            for slot in self._made:
                if self.is_lent(slot):  # the frames of an exception may hold what they held
                    self.replace(slot)
            self._free = list(self._made)

    def look_back(self, slot_user: SlotUser) -> None:
        """Lets the one whose turn comes next in a backward look ahead."""
        if self.slot_users and self.slot_users[0] is not slot_user:
            following = self.slot_users[self.slot_users.index(slot_user) - 1]
            following.prefetch(following.backward_order)
