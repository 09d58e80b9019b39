"""The streamer: device slots, and the copies that fill them ahead of use.

It does what a plan says (load, evict, drain, update) and hands shards to whoever computes, through
:meth:`Streamer.visit`. What becomes of the gradients that a visit leaves is
:mod:`offload.streaming.gradient_offload`'s.

Guarantees
    * A slot is read only after the copy that fills it, and filled only after its last reader.
    * Outside a visit every parameter's ``.data`` is its home.
    * After :meth:`cancel` no copy is in flight and all slots are free.

Assumes
    * Nobody writes to a home between the load of a shard and its eviction. A write that autograd can see is noticed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload.storage import Tier
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.heap import Heap
from offload.streaming.lane import Arrival, Lanes, error_context
from offload.streaming.shard import Shard, State
from offload.streaming.slot_pool import SlotPool
from offload.telemetry.statistics import Meter

if TYPE_CHECKING:
    from offload.optim.update import Update

__all__ = ["Streamer"]


@dataclass
class _Updating:
    """The update that a plan starts just before a load, and the slot that both are given."""

    slot: Tensor
    pending: Update | None
    arrivals: list[Arrival]


class Streamer:
    """Moves the shards of one model."""

    def __init__(
        self,
        shards: list[Shard],
        *,
        slots: int,
        device: torch.device,
        tier: Tier,
        lanes: Lanes,
        meter: Meter,
        budget_bytes: int | None = None,
    ) -> None:
        self.shards = shards
        self.slots = slots
        self._device = device
        self._tier = tier
        self._lanes = lanes
        self._meter = meter
        self._slot_bytes = max((shard.slot_bytes for shard in shards), default=0)
        #: The slots, of this model alone or shared with others that take turns.
        self.slot_pool = SlotPool(device, slots, self._slot_bytes)
        self._loads: dict[int, Arrival] = {}
        self._collected: dict[int, list[Tensor | None]] = {}
        self._updating: dict[int, _Updating] = {}
        self._heap = Heap(budget_bytes) if device.type == "cpu" else None
        #: Whether slots are being given or taken outside of a pass. If an exception leaves it so, :meth:`cancel`.
        self.unsettled = False
        #: Whether the model is in the middle of a pass.
        self.computes: Callable[[], bool] = lambda: False
        #: Cleans up after a pass that was interrupted, if one was.
        self.recover: Callable[[], None] = lambda: None
        #: Finishes the decision of a step, if an exception was raised in the middle of it.
        self.decide: Callable[[], None] | None = None
        #: What brings gradients home.
        self.gradient_offload = GradientOffload(shards, device=device, tier=tier, lane=lanes.drain, meter=meter)

    # --- loads --------------------------------------------------------------------------------------------------

    def resident(self) -> frozenset[int]:
        """The shards that a slot holds, with current values. Copies whose home was written to since are dropped."""
        for shard in self.shards:
            if shard.state is State.LOADED and shard.loaded_versions != shard.versions():
                self.evict(shard.index)
        return frozenset(shard.index for shard in self.shards if shard.state is not State.HOME)

    def pending(self) -> frozenset[int]:
        """The shards that must be updated before they are loaded."""
        return frozenset(shard.index for shard in self.shards if shard.pending is not None)

    def update(self, j: int) -> None:
        """Starts the update of shard ``j`` that an earlier step decided, before its load.

        It may work in the slot that the load is about to fill, so both get the same.
        """
        self._updating[j] = self._start_update(j, self.slot_pool.take(self._meter))

    def update_in_backward(self, j: int) -> None:
        """Starts the update of shard ``j`` with what was just drained."""
        self.gradient_offload.update(self.shards[j])

    def _start_update(self, j: int, slot: Tensor) -> _Updating:
        pending = self.shards[j].pending  # its thread may be done with it at any moment
        return _Updating(slot, pending, [] if pending is None else [pending.start(slot)])

    def load(self, j: int) -> None:
        """Starts to copy shard ``j`` into a free slot."""
        updating = (
            self._updating.pop(j) if j in self._updating else self._start_update(j, self.slot_pool.take(self._meter))
        )
        self._fill(j, updating)

    def _fill(self, j: int, updating: _Updating) -> None:
        shard, slot, pending = self.shards[j], updating.slot, updating.pending
        shard.load(slot)
        self._meter.shard_loads += 1
        nbytes = sum(s.nbytes for s in shard.at_home)
        self._meter.bytes_loaded += nbytes

        def fill() -> None:
            filled = pending is not None and pending.filled(slot)  # which was counted where it was read
            with self._meter.on_lane("load", f"L{j}", 0 if filled else nbytes):
                shard.fill(slot, pending)

        owners = dict.fromkeys(loan.owner for loan in shard.loans)
        # A tied layer is filled from its owner's home, which has an update of its own.
        others = [pending.start() for owner in owners if (pending := owner.pending) is not None]
        # Update lane -> load lane. Without these, the slot is filled with values from before the optimizer's step.
        self._loads[j] = self._lanes.load.submit(f"L{j}", fill, updating.arrivals + others)

    def apply_pending_updates(self) -> None:
        """Finishes what is pending at the homes, because somebody is about to read or write them.

        Raises:
            OSError: if a home cannot be read or written. What could be done is done, the rest is still pending.
        """
        self.recover()
        if self.decide is not None:
            self.decide()
        started = [(shard, pending.start()) for shard in self.shards if (pending := shard.pending) is not None]
        errors: list[BaseException] = []
        for shard, arrival in started:
            try:
                with error_context(f"updating shard {shard.index} in {self._tier.name}"):
                    # Update lane -> host. Without this, parameters are read while they are being written.
                    arrival.synchronize()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def evict(self, j: int, *, warn: bool = True) -> None:
        """Drops shard ``j`` from its slot. The slot is free at once: a copy into it is queued behind its readers."""
        shard = self.shards[j]
        # Without this, a load that nobody used may arrive in the slot after the next one.
        self._loads.pop(j).wait()
        slot = shard.slot
        shard.drop()
        lent = self.slot_pool.is_lent(slot)
        # What still looks at the slot keeps it. Without this, it would see the next shard there.
        self.slot_pool.release(self.slot_pool.replace(slot) if lent else slot)
        if lent and warn:
            warnings.warn(
                f"a view of the weights of shard {j} outlives their visit on the device (an autograd function that "
                f"stores one as an attribute, a hook that keeps one): it keeps {slot.numel():,} bytes, and later "
                f"changes of the weights do not show in it; use ctx.save_for_backward, or keep the parameter itself",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- turns --------------------------------------------------------------------------------------------------

    @staticmethod
    def share_room(stages: Sequence[Sequence[Streamer]]) -> None:
        """Gives streamers of one device a common room: those of a stage work together, stages take turns.

        Its size is that of the largest turn; and where that turn keeps all its shards, one slot more, for the next.
        """
        streamers = [streamer for stage in stages for streamer in stage]
        slots = 0
        for stage in stages:
            held = sum(streamer.slots for streamer in stage)
            keeps_all = held == sum(len(streamer.shards) for streamer in stage)
            slots = max(slots, held + (keeps_all and len(stages) > 1))
        slot_bytes = max(streamer._slot_bytes for streamer in streamers)
        slot_pool = SlotPool(streamers[0]._device, slots, slot_bytes, streamers)
        for streamer in streamers:
            streamer.release()
            if not streamer.slot_pool.shared:
                streamer.slot_pool.leave()
            streamer.slot_pool = slot_pool

    @property
    def backward_order(self) -> Sequence[int]:
        """The shards, last first."""
        return range(len(self.shards) - 1, -1, -1)

    def prefetch(self, order: Sequence[int]) -> None:
        """Begins to load shards in this order, as far as there is room that nobody needs."""
        self.unsettled = True
        there = set(self.resident())
        for j in order:
            if j in there:
                continue
            slot = self.slot_pool.spare(self) if len(there) < self.slots else None
            if slot is None:
                break
            self._fill(j, self._start_update(j, slot))
            there.add(j)
        self.unsettled = False

    def evict_one(self) -> bool:
        """Drops the first shard in a slot; a backward would use it last. False if there is none."""
        j = next((shard.index for shard in self.shards if shard.state is State.LOADED), None)
        if j is not None:
            self.evict(j)
        return j is not None

    @contextlib.contextmanager
    def visit(self, j: int) -> Iterator[Shard]:
        """Inside, shard ``j`` and its parameters are on the compute device. After an exception call :meth:`abandon`."""
        shard = self.shards[j]
        with self._meter.waiting(f"L{j}"), error_context(f"loading shard {j} from {self._tier.name}"):
            # Load lane -> compute. Without this, layers read a slot that is still being filled.
            self._loads[j].wait()
        self.slot_pool.note_views(shard.slot, shard.bind())
        yield shard
        self._collected[j] = shard.unbind()
        if self._heap is not None:
            self._heap.bound()

    def keep_changes(self, j: int, written: Sequence[int]) -> None:
        """To be called at the end of a visit: sends home what layers wrote into their own parameters while they ran.

        Weights travel one way, so this is the exception (an embedding with ``max_norm``, a weight that is clipped).
        ``written``: positions of these parameters.
        """
        shard = self.shards[j]
        for position in written:
            owner, s = shard.owner_of(position)
            owner.home_view(s).copy_(s.parameter.detach())
        shard.loaded_versions = shard.versions()

    def drain(self, j: int) -> None:
        """Starts to send home the gradients that the last visit of shard ``j`` left on the device."""
        self.gradient_offload.drain(self.shards[j], self._collected.pop(j))

    def wait_for_home_reads(self, end: int | None = None) -> None:
        """Waits until nothing reads the homes (of the shards before ``end``).

        From here on they are the user's, who may write there on the host.
        """
        for j, arrival in self._loads.items():
            if end is not None and j >= end:
                continue
            with self._meter.waiting(f"L{j}"), error_context(f"loading shard {j} from {self._tier.name}"):
                # Load lane -> host. Without this, a forward that is still queued would load what is written next.
                arrival.synchronize()

    # --- ends ---------------------------------------------------------------------------------------------------

    def release(self, *, warn: bool = True) -> None:
        """Drops every resident shard."""
        self.unsettled = True
        for shard in self.shards:
            if shard.state is State.LOADED:
                self.evict(shard.index, warn=warn)
        self.unsettled = False

    def cancel(self) -> None:
        """After a failure: waits for what is in flight, whatever becomes of it. Parameters are home, slots are free.

        Whatever state an exception left, at whatever line it was raised; and may be called again after one that was
        interrupted itself. Models that share the room drop what they have there, too.
        """
        for slot_user in self.slot_pool.slot_users or [self]:
            slot_user.reset()
        self.slot_pool.reset()

    def reset(self) -> None:
        """The part of :meth:`cancel` that is this model's."""
        # All lanes -> host, also copies whose submission was interrupted. Without this, a load or a gradient arrives in
        # memory that is somebody else's.
        self._lanes.wait_idle()
        for shard in self.shards:
            if (pending := shard.pending) is not None:
                # Update lane -> host. Without this, an update goes on in a slot that is somebody else's.
                pending.wait_idle()
        self.gradient_offload.cancel()
        for shard in self.shards:
            shard.reset()
        self._loads.clear()
        self._updating.clear()
        self._collected.clear()
        self.unsettled = False
