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
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from offload.lane import Arrival, Lanes, naming
from offload.shard import Shard, State
from offload.statistics import Meter
from offload.tier import Tier
from offload.tier.contract import bytes_of

__all__ = ["Streamer"]


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
        self._free: list[Tensor] | None = None  # the slots are made at the first use
        self._loads: dict[int, Arrival] = {}
        self._collected: dict[int, list[Tensor | None]] = {}
        self._drains: deque[tuple[Arrival, int, list[Tensor]]] = deque()

    # --- loads --------------------------------------------------------------------------------------------------

    def resident(self) -> frozenset[int]:
        """The shards that a slot holds, with current values. Copies whose home was written to since are dropped."""
        for shard in self.shards:
            if shard.state is State.LOADED and shard.loaded_versions != shard.versions():
                self.evict(shard.index)
        return frozenset(shard.index for shard in self.shards if shard.state is not State.HOME)

    def load(self, j: int) -> None:
        """Starts to copy shard ``j`` into a free slot."""
        if self._free is None:
            # Without this, slots made by a first call inside inference mode could never be filled outside it.
            with torch.inference_mode(False):
                self._free = [
                    torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(self.slots)
                ]
            self._meter.hold(self.slots * self._slot_bytes)
        shard = self.shards[j]
        slot = self._free.pop()
        shard.load(slot)
        self._meter.shard_loads += 1
        self._meter.bytes_loaded += sum(s.nbytes for s in shard.at_home)

        def fill() -> None:
            with self._meter.loading.span():
                shard.fill(slot)

        self._loads[j] = self._lanes.load.submit(f"L{j}", fill)

    def evict(self, j: int) -> None:
        """Drops shard ``j`` from its slot. The slot is free at once: a copy into it is queued behind its readers."""
        shard = self.shards[j]
        # Without this, a load that nobody used may arrive in the slot after the next one.
        self._loads.pop(j).wait()
        slot = shard.slot
        shard.drop()
        assert self._free is not None
        self._free.append(slot)

    @contextlib.contextmanager
    def visit(self, j: int) -> Iterator[Shard]:
        """Inside, shard ``j`` is on the compute device and its parameters are there."""
        shard = self.shards[j]
        with self._meter.wait.span(), naming(f"loading shard {j} from {self._tier.name}"):
            # Load lane -> compute. Without this, layers read a slot that is still being filled.
            self._loads[j].wait()
        shard.bind()
        try:
            yield shard
        finally:
            self._collected[j] = shard.unbind()

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
        moves: list[Callable[[], object]] = []
        nbytes = 0
        for position, gradient in enumerate(gradients):
            if gradient is not None:
                nbytes += gradient.numel() * gradient.element_size()
                moves.extend(self._homeward(shard, position, gradient))
        self._meter.bytes_stored += nbytes
        if not moves:
            return
        self._meter.hold(nbytes)
        # One set of gradients on its way, one being summed. It is also what keeps two additions to one tied gradient in
        # order. It has had a whole visit's time, so the wait is short.
        while self._drains:
            self._finish_drain()

        def copy() -> None:
            with self._meter.draining.span():
                for move in moves:
                    move()

        arrival = self._lanes.drain.submit(f"D{j}", copy)
        # The tensors stay until the copy is done. Without this, their memory is reused while it is being read.
        self._drains.append((arrival, nbytes, [g for g in gradients if g is not None]))

    def _homeward(self, shard: Shard, position: int, gradient: Tensor) -> Iterator[Callable[[], object]]:
        """What must be copied to bring one gradient home. ``.grad`` is set at once, its bytes arrive with the lane."""
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
        else:
            block, view = owner.gradient_home(s, self._tier)
            parameter.grad = view
            if gradient.stride() == s.stride and gradient.dtype == parameter.dtype:
                yield partial(block.write, bytes_of(gradient), s.offset)
            else:
                yield partial(view.copy_, gradient, non_blocking=True)

    def _finish_drain(self, *, on_host: bool = False) -> None:
        arrival, nbytes, _gradients = self._drains[0]
        with self._meter.wait.span(), naming(f"storing gradients to {self._tier.name}"):
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
        self.release()


class _Done(Arrival):
    def wait(self) -> None:
        """Nothing is on its way."""

    finish = wait


_DONE = _Done()


def _add(home: Tensor, gradient: Tensor) -> None:
    """Adds in the home's precision: on the spot, or where the gradient is if that is a device."""
    if gradient.device == home.device:
        home.add_(gradient)
        return
    total = home.to(gradient.device, non_blocking=True)
    home.copy_(total.add_(gradient), non_blocking=True)
