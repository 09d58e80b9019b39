"""Loads shards into device slots ahead of their use, and runs the plan's other copies: evict, drain, update.

Layers compute with a shard inside :meth:`Streamer.visit`: in its slot; or in place, where it rests in the memory that
layers compute in, and then nothing is loaded or evicted. :mod:`offload.streaming.gradient_offload` stores the
gradients of a visit.

Guarantees
    * A slot is read only after the copy that fills it, and filled only after its last reader.
    * Outside a visit every parameter's ``.data`` is in storage.
    * After :meth:`cancel` no copy is in flight and all slots are free.

Assumes
    * Stored weights are not written between the load of a shard and its eviction. Writes that autograd sees are
      detected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.partition import slot_sizes
from offload.storage import Tier
from offload.storage.buffer import device_buffer
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import Arrival, CopyLanes, error_context
from offload.streaming.shard import Shard
from offload.telemetry.statistics import LOAD_FROM_MEMORY, Meter
from offload.units import shown_bytes
from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.tensors import storage_uses

__all__ = ["SlotPool", "Streamer", "share_slots"]


class SlotPool:
    """Equal device buffers (slots) that hold loaded shards, of one model or of models that compute in turns.

    A shard that is larger than a slot gets a buffer of its own, which is freed when the shard is evicted.

    Models that never compute at the same time can share slots: the computing model acquires them, and the others evict
    their shards, least recently used model first. So a device holds the slots of one turn, and one more for the next
    turn, whatever the number of models. A computing model never loses a slot, and gets as many as it has when alone.
    Memory is allocated once, at first use. Two models of a pool that compute at once raise an error.

    ``streamers``: of models that share them, in the order of their forward turns; empty for one model alone.
    """

    def __init__(
        self, device: torch.device, slots: int, slot_bytes: int, meter: Meter, streamers: Sequence[Streamer] = ()
    ) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._device, self._meter = device, meter
        self.streamers = list(streamers)
        #: Whether models share the pool.
        self.shared = bool(self.streamers)
        #: The one that computes now, or did so last, is the last.
        self._recent = list(streamers)
        #: All slots, once they are allocated, and those that hold no shard.
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []
        #: Buffers of single shards by their identity.
        self._own: dict[int, Tensor] = {}
        #: References to each slot that the engine made, by its identity.
        self._views: dict[int, int] = {}

    def computes(self, streamer: Streamer) -> None:
        """Called when ``streamer`` computes next, where models share the pool; RuntimeError if another one computes."""
        if (before := self._recent[-1]) is not streamer:
            engine = before.engine()
            # Backwards of several models run in one of autograd.
            if engine is not None and engine.backward.forward is not None:
                raise RuntimeError("two models that take turns on one device compute at once; do not share their slots")
            self._recent = [*(other for other in self._recent if other is not streamer), streamer]

    def acquire_slot(self, nbytes: int) -> Tensor:
        """Acquires a slot for a shard of the computing model; for one that is larger than a slot, a buffer of its own.

        The buffer is freed when it is released.
        """
        if nbytes > self.slot_bytes:
            own = self._allocate(nbytes)
            self._meter.hold(nbytes)
            self._own[id(own)] = own
            return own
        if not self._all:
            self._all = [self._allocate(self.slot_bytes) for _ in range(self.slots)]
            self._free = list(self._all)
            self._meter.hold(self.slots * self.slot_bytes)
        self._evict_others()
        return self._free.pop()

    def acquire_unneeded(self, streamer: Streamer) -> Tensor | None:
        """Acquires a slot that the current turn does not need, for a prefetch; None if there is none."""
        self._evict_others(streamer)
        return self._free.pop() if self._free else None

    def _allocate(self, nbytes: int) -> Tensor:
        # Without this, slots allocated inside inference mode could never be filled outside it.
        with outside_inference_mode():
            return device_buffer(nbytes, self._device)

    def _evict_others(self, prefetching: Streamer | None = None) -> None:
        """Frees a slot, if none is free and a model has one that neither computes nor prefetches."""
        while not self._free and any(other.evict_one() for other in self._recent[:-1] if other is not prefetching):
            pass

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
        new = self._allocate(slot.numel())
        self._all = [new if old is slot else old for old in self._all]
        self._views.pop(id(slot), None)
        return new

    def release(self, slot: Tensor, *, last: bool = False) -> None:
        """Returns a slot; ``last``: others are acquired before it, since an update still writes to it."""
        if id(slot) in self._own:
            self._views.pop(id(slot), None)
            del self._own[id(slot)]
            self._meter.release(slot.numel())
            return
        self._free.insert(0 if last else len(self._free), slot)

    def resize(self, slots: int, slot_bytes: int) -> None:
        """Changes number and size of the slots, while all are free; they are allocated at their next use."""
        if (slots, slot_bytes) != (self.slots, self.slot_bytes):
            self.free_memory()
            self.slots, self.slot_bytes = slots, slot_bytes

    def free_memory(self) -> None:
        """Frees all memory: no shard is in a slot, and other slots are needed, or an exception's frames hold views."""
        for slot in list(self._own.values()):
            self.release(slot)
        self._meter.release(sum(slot.numel() for slot in self._all))
        self._all, self._free = [], []
        self._views.clear()

    def prefetch_previous(self, streamer: Streamer) -> None:
        """Lets the model whose backward turn is next prefetch."""
        if self.streamers and self.streamers[0] is not streamer:
            following = self.streamers[self.streamers.index(streamer) - 1]
            following.prefetch(backward=True)


class Streamer:
    """Loads and evicts the shards of one model."""

    def __init__(
        self,
        shards: list[Shard],
        gradient_offload: GradientOffload,
        *,
        slots: int,
        device: torch.device,
        tier: Tier,
        lanes: CopyLanes,
        meter: Meter,
        own_slots: bool,
    ) -> None:
        self.shards, self.gradient_offload = shards, gradient_offload
        #: Whether shards that are much larger than others have buffers of their own beside the slots.
        self.own_slots = own_slots
        #: Slots that passes use; fewer where fewer shards are loaded.
        self.slots = self.most_slots = min(slots, len(shards))
        self.device, self.meter = device, meter
        #: Storage of the homes, and what copies.
        self.tier, self.lanes = tier, lanes
        #: Of each slot, for passes with all slots.
        self.slot_bytes = self._size_of_slots(self.slots)
        #: The slots, of this model alone or shared with models that compute in turns.
        self.slot_pool = SlotPool(device, self.slots, self.slot_bytes, meter)
        #: The shards that are in slots, or on the way there, the earliest first, with the copies that fill these.
        self.loaded: dict[int, Arrival] = {}
        #: True while slots are filled or evicted outside a pass. If an exception leaves it True, call :meth:`cancel`.
        self.must_cancel = False
        #: Returns the engine that runs the model, as long as there is one.
        self.engine: Callable[[], Any] = lambda: None
        #: Finishes an interrupted decision of ``optimizer.step()``, if there was one.
        self.finish_step: Callable[[], None] | None = None

    def resize(self, slots: int) -> None:
        """Changes the most slots that passes use, between passes. Shared slots stay as they are."""
        if slots != self.most_slots and not self.slot_pool.shared:
            self.most_slots = slots
            self.homes_moved()

    def resident(self) -> frozenset[int]:
        """The shards in slots, with current values. Evicts those whose stored weights were written since the load."""
        for j in list(self.loaded):
            if self.shards[j].loaded_versions != self.shards[j].versions():
                self.evict(j)
        return frozenset(self.loaded)

    def in_place(self) -> frozenset[int]:
        """The shards that layers use where they rest."""
        return frozenset(shard.index for shard in self.shards if shard.in_place)

    @property
    def updates_at_once(self) -> bool:
        """Whether updates run when an optimizer steps: where all shards are used in place, no copy could overlap."""
        return all(shard.in_place for shard in self.shards)

    def homes_moved(self) -> None:
        """Called when other shards are used in place than before, between passes: keeps no more slots than needed."""
        self.release()
        in_place = self.in_place()
        self.slots = min(self.most_slots, len(self.shards) - len(in_place))
        if not self.slot_pool.shared:
            self.slot_pool.resize(self.slots, self._size_of_slots(self.slots, in_place))

    def _size_of_slots(self, slots: int, in_memory: frozenset[int] = frozenset()) -> int:
        sizes = [shard.slot_bytes for shard in self.shards]
        return slot_sizes(sizes, slots, in_memory=in_memory, apart=self.own_slots)[0]

    def pending(self) -> frozenset[int]:
        """The shards that must be updated before they are loaded, or used in place."""
        return frozenset(shard.index for shard in self.shards if shard.pending is not None)

    def update_in_backward(self, j: int) -> None:
        """Starts the update of shard ``j`` with the gradients just drained, in its slot where that is safe."""
        shard = self.shards[j]
        in_slot = (
            j in self.loaded
            and not shard.written
            and shard.slot_keeps_weights
            and not self.slot_pool.shared
            and shard.loaded_versions == shard.versions()
            and not self.slot_pool.is_referenced(shard.slot)
        )
        if in_slot:
            # A backward that needs no weights, such as that of a shift, has not waited for them. Without this, the slot
            # is updated before it is filled.
            self.await_load(j)
        self.gradient_offload.update(shard, shard.slot if in_slot else None)

    def load(self, j: int) -> None:
        """Starts to copy shard ``j`` into a free slot."""
        self._fill(j, self.slot_pool.acquire_slot(self.shards[j].slot_bytes))

    def _fill(self, j: int, slot: Tensor) -> None:
        shard = self.shards[j]
        pending = shard.pending  # read once: a thread may reset it at any time
        free = None if self.gradient_offload.is_updated(slot) else slot
        arrivals = [] if pending is None else [pending.start(free)]
        shard.load(slot)
        self.meter.shard_loads += 1
        nbytes = shard.bytes_at_home
        self.meter.bytes_loaded += nbytes
        kind = LOAD_FROM_MEMORY if shard.file is not None else None

        def fill() -> None:
            filled = pending is not None and pending.filled(slot)  # the update counted these bytes
            with self.meter.on_lane("load", f"L{j}", 0 if filled else nbytes, kind=kind):
                shard.fill(slot, pending)

        owners = dict.fromkeys(owner for owner, _ in shard.borrowed)
        # A tied parameter is loaded from its owner's block, which has an update of its own.
        others = [pending.start() for owner in owners if (pending := owner.pending) is not None]
        others += self.gradient_offload.pop_update(slot)
        # Update lane -> load lane. Without these, the slot is filled with values from before the optimizer's step, or
        # while the shard that was in it before is updated there.
        self.loaded[j] = self.lanes.load.submit(f"L{j}", fill, arrivals + others)

    def clean_up(self) -> None:
        """Cleans up after an interrupted pass, if there was one."""
        if (engine := self.engine()) is not None:
            engine.clean_up()

    def apply_pending_updates(self) -> None:
        """Runs all pending updates and waits for them, before stored weights are read or written.

        Raises OSError if storage cannot be read or written: other updates are done, the failed ones still pending.
        """
        self.clean_up()
        if self.finish_step is not None:
            self.finish_step()
        errors: list[BaseException] = []
        started = [(shard, pending.start()) for shard in self.shards if (pending := shard.pending) is not None]
        for shard, arrival in started:
            try:
                with error_context(f"updating shard {shard.index} in {self.tier.name}"):
                    # Update lane -> host. Without this, parameters are read while they are written.
                    arrival.synchronize()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def evict(self, j: int) -> None:
        """Evicts shard ``j``. Its slot is free at once, since copies into it are queued after its readers."""
        shard = self.shards[j]
        # Without this, an unused load may write to the slot after the next one.
        self.loaded.pop(j).wait()
        slot = shard.slot
        shard.drop()
        updated = self.gradient_offload.is_updated(slot)
        referenced = not updated and self.slot_pool.is_referenced(slot)  # an update has views of its own
        # Remaining views keep the slot. Without this, they would show the next shard.
        self.slot_pool.release(self.slot_pool.replace(slot) if referenced else slot, last=updated)
        if referenced:
            _warn_of_view(j, slot)

    def use_slots(self, slot_pool: SlotPool) -> None:
        """Computes in slots of this pool from now on, between passes."""
        self.release()
        if not self.slot_pool.shared:
            self.slot_pool.free_memory()
        self.slot_pool = slot_pool

    def prefetch(self, *, backward: bool) -> None:
        """Starts to load the first shards of a pass, while there are slots that the current turn does not need."""
        self.must_cancel = True
        there = set(self.resident())
        for shard in reversed(self.shards) if backward else self.shards:
            if shard.index in there or shard.in_place:
                continue
            fits = len(there) < self.slots and shard.slot_bytes <= self.slot_pool.slot_bytes
            slot = self.slot_pool.acquire_unneeded(self) if fits else None
            if slot is None:
                break
            self._fill(shard.index, slot)
            there.add(shard.index)
        self.must_cancel = False

    def evict_one(self) -> bool:
        """Evicts the first loaded shard, which backward uses last. False if there is none."""
        if not self.loaded:
            return False
        self.evict(min(self.loaded))
        return True

    def await_load(self, j: int) -> None:
        """Makes compute wait for the load of shard ``j``."""
        with self.meter.waiting(f"L{j}", f"loading shard {j} from {self.tier.name}"):
            # Load lane -> compute. Without this, layers read a slot that is not filled yet.
            self.loaded[j].wait()

    def await_update_in_place(self, j: int) -> None:
        """Makes compute wait for the pending update of a shard that layers use where it rests."""
        if (pending := self.shards[j].pending) is not None:
            with self.meter.waiting(f"U{j}", f"updating shard {j} in memory"):
                # Update lane -> compute. Without this, layers read weights from before the optimizer's step.
                pending.start().wait()

    def wait_for_home_reads(self) -> None:
        """Blocks the host until no load reads stored weights: they may be written."""
        for j, arrival in self.loaded.items():
            with self.meter.waiting(f"L{j}", f"loading shard {j} from {self.tier.name}"):
                # Load lane -> host. Without this, a queued load would read what the user writes next.
                arrival.synchronize()

    def release(self) -> None:
        """Evicts every resident shard."""
        self.must_cancel = True
        for j in list(self.loaded):
            self.evict(j)
        self.must_cancel = False

    def cancel(self) -> None:
        """After a failure: waits for all copies in flight, moves parameters back to storage and frees all slots.

        Works after an exception at any line, and again after an interrupted call. Models that share the slots drop
        theirs, too.
        """
        for streamer in self.slot_pool.streamers or [self]:
            streamer.reset()
        self.slot_pool.free_memory()

    def reset(self) -> None:
        """This model's part of :meth:`cancel`."""
        # All lanes -> host, also copies whose submission was interrupted. Without this, a load or a gradient is written
        # to memory that is reused already.
        self.lanes.wait_idle()
        for shard in self.shards:
            if (pending := shard.pending) is not None:
                # Update lane -> host. Without this, an update computes in a slot that is reused already.
                pending.wait_idle()
        self.gradient_offload.cancel()
        for shard in self.shards:
            shard.drop()
        self.loaded.clear()
        self.must_cancel = False


def share_slots(stages: Sequence[Sequence[Streamer]]) -> None:
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
    slot_pool = SlotPool(streamers[0].device, slots, slot_bytes, streamers[0].meter, streamers)
    for streamer in streamers:
        streamer.use_slots(slot_pool)


def _warn_of_view(j: int, slot: Tensor) -> None:
    warnings.warn(
        f"a view of the weights of shard {j} outlives their use on the device (stored as an attribute of an "
        f"autograd function, or by a hook): it occupies {shown_bytes(slot.numel())}, and later changes of the "
        f"weights do not show in it; use ctx.save_for_backward, or keep the parameter itself",
        RuntimeWarning,
        stacklevel=3,
    )
