"""The streamer: device slots, and the copies that fill them ahead of use and send gradients home.

It does what a plan says (load, evict, drain) and hands shards to whoever computes, through :meth:`Streamer.visit`.

Guarantees
    * A slot is read only after the copy that fills it, and filled only after its last reader.
    * Outside a visit every parameter's ``.data`` is its home.
    * After :meth:`settle` every gradient is home. After :meth:`abandon` no copy is in flight and all slots are free.

Assumes
    * Nobody writes to a home between the load of a shard and its eviction. A write that autograd can see is noticed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from offload.heap import Heap
from offload.lane import Arrival, Lanes, naming
from offload.norm import norm_of, note
from offload.room import Room
from offload.shard import Shard, Slice, State
from offload.statistics import Meter
from offload.tier import Block, Tier
from offload.tier.contract import bytes_of

__all__ = ["Streamer", "Updater"]


class Updater(Protocol):
    """An optimizer that updates each shard in backward, as soon as its gradients are complete."""

    def begin(self, waiting: int) -> None:
        """A backward begins, while ``waiting`` other forwards still wait for theirs. May refuse it."""
        ...

    def keep(self, shard: Shard, gradients: list[Tensor | None]) -> dict[Slice, Tensor]:
        """Takes the gradients that need not go home out of what a visit left."""
        ...

    def complete(self, shard: Shard, kept: dict[Slice, Tensor], after: Sequence[Arrival]) -> Arrival | None:
        """Starts to update the shard, ``after`` its other gradients are home."""
        ...

    def end(self, *, failed: bool = False) -> None:
        """The backward is over."""
        ...


class Streamer:
    """Moves the shards of one model."""

    def __init__(
        self, shards: list[Shard], *, slots: int, device: torch.device, tier: Tier, lanes: Lanes, meter: Meter
    ) -> None:
        self.shards = shards
        self.slots = slots
        self._device = device
        self._tier = tier
        self._lanes = lanes
        self._meter = meter
        self._slot_bytes = max((shard.slot_bytes for shard in shards), default=0)
        #: The slots, of this model alone or shared with others that take turns.
        self.room = Room(device, slots, self._slot_bytes)
        self._loads: dict[int, Arrival] = {}
        self._collected: dict[int, list[Tensor | None]] = {}
        self._drains: deque[tuple[Arrival, int, list[Tensor]]] = deque()
        #: Whether the norm of each gradient is wanted, and what is known of those on their way.
        self.note_norms = False
        self._norms: list[tuple[nn.Parameter, Tensor]] = []
        #: Bytes of gradients that may wait in host memory for their update, where homes are on disk.
        self.gradient_bytes = 0
        self._heap = Heap() if device.type == "cpu" else None
        #: Who updates shards during backward, if anybody does.
        self.updater: Updater | None = None

    # --- loads --------------------------------------------------------------------------------------------------

    def resident(self) -> frozenset[int]:
        """The shards that a slot holds, with current values. Copies whose home was written to since are dropped."""
        for shard in self.shards:
            if shard.state is State.LOADED and shard.loaded_versions != shard.versions():
                self.evict(shard.index)
        return frozenset(shard.index for shard in self.shards if shard.state is not State.HOME)

    def load(self, j: int) -> None:
        """Starts to copy shard ``j`` into a free slot."""
        self._fill(j, self.room.take(self._meter))

    def _fill(self, j: int, slot: Tensor) -> None:
        shard = self.shards[j]
        shard.load(slot)
        self._meter.shard_loads += 1
        self._meter.bytes_loaded += sum(s.nbytes for s in shard.at_home)

        update = shard.pending

        def fill() -> None:
            with self._meter.on_lane("load", f"L{j}"):
                shard.fill(slot, update)

        owners = dict.fromkeys(loan.owner for loan in shard.loans)
        # Update lane -> load lane. Without these, the slot is filled with values from before the optimizer's step.
        updates = [] if update is None else [update.start(slot)]
        updates += [pending.start() for owner in owners if (pending := owner.pending) is not None]
        self._loads[j] = self._lanes.load.submit(f"L{j}", fill, updates)

    def catch_up(self) -> None:
        """Finishes what is pending at the homes, because somebody is about to read or write them.

        Raises:
            OSError: if a home cannot be read or written. What could be done is done, the rest is still pending.
        """
        started = [(shard, pending.start()) for shard in self.shards if (pending := shard.pending) is not None]
        errors: list[BaseException] = []
        for shard, arrival in started:
            try:
                with naming(f"updating shard {shard.index} in {self._tier.name}"):
                    # Update lane -> host. Without this, parameters are read while they are being written.
                    arrival.finish()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def evict(self, j: int) -> None:
        """Drops shard ``j`` from its slot. The slot is free at once: a copy into it is queued behind its readers."""
        shard = self.shards[j]
        # Without this, a load that nobody used may arrive in the slot after the next one.
        self._loads.pop(j).wait()
        slot = shard.slot
        shard.drop()
        self.room.give(slot)

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
        room = Room(streamers[0]._device, slots, slot_bytes, streamers)
        for streamer in streamers:
            streamer.release()
            if not streamer.room.shared:
                streamer.room.leave()
            for shard in streamer.shards:
                shard.forget_slots()
            streamer.room = room

    @property
    def backward_order(self) -> Sequence[int]:
        """The shards, last first."""
        return range(len(self.shards) - 1, -1, -1)

    def look_ahead(self, order: Sequence[int]) -> None:
        """Begins to load shards in this order, as far as there is room that nobody needs."""
        there = set(self.resident())
        for j in order:
            if j in there:
                continue
            slot = self.room.spare(self) if len(there) < self.slots else None
            if slot is None:
                return
            self._fill(j, slot)
            there.add(j)

    def give_up(self) -> bool:
        """Drops the first shard in a slot; a backward would use it last. False if there is none."""
        j = next((shard.index for shard in self.shards if shard.state is State.LOADED), None)
        if j is not None:
            self.evict(j)
        return j is not None

    @contextlib.contextmanager
    def visit(self, j: int) -> Iterator[Shard]:
        """Inside, shard ``j`` is on the compute device and its parameters are there."""
        shard = self.shards[j]
        with self._meter.waiting(f"L{j}"), naming(f"loading shard {j} from {self._tier.name}"):
            # Load lane -> compute. Without this, layers read a slot that is still being filled.
            self._loads[j].wait()
        shard.bind()
        try:
            yield shard
        finally:
            self._collected[j] = shard.unbind()
            if self._heap is not None:
                self._heap.bound()

    def keep_changes(self, j: int) -> None:
        """To be called at the end of a visit: sends home what layers wrote into their own parameters while they ran.

        Weights travel one way, so this is the exception (an embedding with ``max_norm``, a weight that is clipped).
        """
        shard = self.shards[j]
        versions = shard.versions()
        if versions == shard.loaded_versions:
            return
        for position, (before, after) in enumerate(zip(shard.loaded_versions, versions, strict=True)):
            if before != after:
                owner, s = shard.owner_of(position)
                owner.home_view(s).copy_(s.parameter.detach())
        shard.loaded_versions = versions

    # --- gradients ----------------------------------------------------------------------------------------------

    def drain(self, j: int) -> None:
        """Starts to add the gradients that the last visit left on the device to the homes' ``.grad``.

        A ``.grad`` that is None takes the first gradient as it is, instead of adding it to zeros.
        """
        shard, gradients = self.shards[j], self._collected.pop(j)
        if self.updater is None:
            self._send_home(shard, gradients)
            return
        kept = self.updater.keep(shard, gradients)
        self._send_home(shard, gradients)
        # Drain lane -> update lane. Without ``after``, a shard is updated with gradients that are not complete.
        update = self.updater.complete(shard, kept, after=[arrival for arrival, _, _ in self._drains])
        if update is not None:
            while len(self._drains) > 1:  # so that gradients do not pile up before a slow home
                self._finish_drain()
            nbytes = _nbytes(kept.values())
            self._meter.hold(nbytes)
            self._drains.append((update, nbytes, list(kept.values())))

    def _send_home(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Takes the gradients out of the list: on the host each is free as soon as it is home."""
        nbytes = _nbytes(gradient for gradient in gradients if gradient is not None)
        # On a device the tensors stay until the copy is done. Without this, their memory is reused while it is read.
        staying = [g for g in gradients if g is not None] if self._device.type != "cpu" else []
        moves: deque[tuple[nn.Parameter, Callable[[], Tensor]]] = deque()
        for position in range(len(gradients)):
            gradient, gradients[position] = gradients[position], None
            if gradient is not None:
                parameter = shard.owner_of(position)[1].parameter
                moves.extend((parameter, move) for move in self._homeward(shard, position, gradient))
        gradient = None
        if not (self._tier.blocking_io and self._waits_in_memory(shard)):
            self._meter.bytes_stored += nbytes
        if not moves:
            return
        self._meter.hold(nbytes)
        # One set of gradients on its way, one being summed. It is also what keeps two additions to one tied gradient in
        # order. It has had a whole visit's time, so the wait is short.
        while self._drains:
            self._finish_drain()

        def copy() -> None:
            with self._meter.on_lane("drain", f"D{shard.index}"):
                while moves:
                    parameter, move = moves.popleft()
                    total = move()
                    if self.note_norms and not total.is_sparse:
                        self._norms.append((parameter, norm_of(total)))
                    del move, total

        arrival = self._lanes.drain.submit(f"D{shard.index}", copy)
        self._drains.append((arrival, nbytes, staying))

    def _homeward(self, shard: Shard, position: int, gradient: Tensor) -> Iterator[Callable[[], Tensor]]:
        """What must be copied to bring one gradient home; it returns all that is home then, on any device.

        ``.grad`` is set at once, its bytes arrive with the lane.
        """
        owner, s = shard.owner_of(position)
        parameter = s.parameter
        resting = parameter.grad
        if gradient.is_sparse or (resting is not None and resting.is_sparse):
            moved = gradient.to(parameter.device)
            parameter.grad = moved if resting is None else resting + moved
        elif resting is not None:
            yield partial(_add, resting, gradient)
        elif gradient.device == parameter.device and not self._tier.blocking_io and gradient.dtype == parameter.dtype:
            parameter.grad = gradient
            if self.note_norms:
                yield lambda: gradient
        elif self._tier.blocking_io and self._waits_in_memory(owner):
            if gradient.device.type == "cpu" and gradient.dtype == parameter.dtype:
                parameter.grad = gradient
                if self.note_norms:
                    yield lambda: gradient
            else:
                host = torch.empty_strided(parameter.shape, s.stride, dtype=parameter.dtype)
                parameter.grad = host
                yield partial(_convert, host, gradient)
        else:
            block, view = owner.gradient_home(s, self._tier)
            parameter.grad = view
            if gradient.stride() == s.stride and gradient.dtype == parameter.dtype:
                yield partial(_store, block, s.offset, gradient)
            else:
                yield partial(_convert, view, gradient)

    def _waits_in_memory(self, shard: Shard) -> bool:
        """Whether the gradients of a shard need not go to disk: those of the first shards, which are updated first."""
        if not self.gradient_bytes:
            return False
        return sum(s.nbytes for other in self.shards[: shard.index + 1] for s in other.own) <= self.gradient_bytes

    def _finish_drain(self, *, on_host: bool = False) -> None:
        arrival, nbytes, _gradients = self._drains[0]
        with self._meter.waiting("D"), naming(f"storing gradients to {self._tier.name}"):
            if on_host:
                arrival.finish()
            else:
                arrival.wait()
        self._drains.popleft()
        self._meter.release(nbytes)

    def settle(self) -> None:
        """Waits until all gradients are home."""
        while self._drains:
            # Drain lane -> host. Without this, an optimizer on the host reads gradients that have not arrived.
            self._finish_drain(on_host=True)
        # Only now: a note counts until the next write, and a block's writes are counted together.
        for parameter, norm in self._norms:
            if parameter.grad is not None:
                note(parameter.grad, norm)
        self._norms.clear()
        if self.updater is not None:
            self.updater.end()

    def leave_homes(self) -> None:
        """Waits until nothing reads the homes: from here on they are the user's, who may write there on the host."""
        for j, arrival in self._loads.items():
            with self._meter.waiting(f"L{j}"), naming(f"loading shard {j} from {self._tier.name}"):
                # Load lane -> host. Without this, a forward that is still queued would load what is written next.
                arrival.finish()

    # --- ends ---------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Drops every resident shard."""
        for shard in self.shards:
            if shard.state is State.LOADED:
                self.evict(shard.index)

    def abandon(self) -> None:
        """After a failure: waits for what is in flight, whatever becomes of it, and frees all slots."""
        for j in list(self._loads):
            with contextlib.suppress(Exception):
                self._loads[j].finish()
            self._loads[j] = _DONE
        while self._drains:
            arrival, nbytes, _ = self._drains.popleft()
            with contextlib.suppress(Exception):
                arrival.finish()
            self._meter.release(nbytes)
        self._collected.clear()
        self._norms.clear()
        if self.updater is not None:
            self.updater.end(failed=True)
        self.release()


class _Done(Arrival):
    def wait(self) -> None:
        """Nothing is on its way."""

    finish = wait


_DONE = _Done()


def _nbytes(gradients: Iterable[Tensor]) -> int:
    return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def _store(block: Block, offset: int, gradient: Tensor) -> Tensor:
    block.write(bytes_of(gradient), offset)
    return gradient


def _convert(home: Tensor, gradient: Tensor) -> Tensor:
    home.copy_(gradient, non_blocking=True)
    return gradient


def _add(home: Tensor, gradient: Tensor) -> Tensor:
    """Adds in the home's precision: on the spot, or where the gradient is if that is a device."""
    if gradient.device == home.device:
        return home.add_(gradient)
    total = home.to(gradient.device, non_blocking=True)
    home.copy_(total.add_(gradient), non_blocking=True)
    return total
