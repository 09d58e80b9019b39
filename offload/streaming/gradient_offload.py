"""Offloads gradients: adds what backward left on the device to the ``.grad`` of the stored parameters.

A ``.grad`` that is None becomes the first gradient; otherwise gradients are added in the stored precision. Norms are
computed on the way, and an optimizer that updates in backward may keep the gradients of its shard.

Guarantees
    * At most one shard's gradients are copied while the next ones are computed, so they do not accumulate in memory
      before slow storage, and additions to one tied gradient keep their order.
    * After :meth:`GradientOffload.wait_idle` every gradient is stored. After :meth:`GradientOffload.cancel` none is
      being copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from offload.storage import Block, Tier
from offload.storage.buffer import has_own_memory
from offload.storage.contract import bytes_of
from offload.streaming.grad_norm import attach_norm, norm_of, norm_of_pieces, pieces_of
from offload.streaming.lane import Arrival, CopyLane
from offload.streaming.optimizers import InBackward, Optimizers
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from offload.streaming.stored_gradients import GradientTypes, set_gradient
from offload.telemetry.statistics import DRAIN_TO_MEMORY, Meter

__all__ = ["GradientOffload"]


class GradientOffload:
    """Offloads the gradients of one model."""

    def __init__(
        self, shards: Sequence[Shard], *, device: torch.device, tier: Tier, lane: CopyLane, meter: Meter
    ) -> None:
        self._shards = shards
        self._device = device
        self._tier = tier
        self._lane = lane
        self._meter = meter
        self._drains: deque[tuple[Arrival, int, list[Tensor]]] = deque()
        #: Bytes of gradients that may be kept in host memory until their update, where homes are on disk.
        self.kept_bytes = 0
        #: The shards whose gradients wait in memory for their update; None: by :attr:`kept_bytes`.
        self.waiting: Collection[int] | None = None
        #: They request norms, gradients in host memory, and updates during backward.
        self.optimizers = Optimizers()
        #: Whether an optimizer needs norms in this backward.
        self._clips = False
        #: Norms of gradients that are being copied.
        self._norms: dict[nn.Parameter, Tensor] = {}
        #: The optimizer that updates shards in this backward, if any, and the gradients of shards not yet updated.
        self._updater: InBackward | None = None
        self._unfinished: dict[Shard, dict[Slice, Tensor]] = {}
        #: The updates of this backward that write to a slot, by its address, until another shard fills it.
        self._in_slots: dict[int, Arrival] = {}

    def begin(
        self,
        waiting: int,
        hooked: Collection[nn.Parameter] = (),
        *,
        stores: bool = True,
        order: Sequence[int] | None = None,
    ) -> bool:
        """Starts a backward while ``waiting`` other forwards need theirs; returns whether it is to update each shard.

        Args:
            waiting: forwards.
            hooked: parameters whose gradients autograd gets, since they have hooks.
            stores: whether gradients are added to ``.grad``.
            order: the shards in the order in which the forward used them; None: that of their numbers.

        Raises RuntimeError if a shard cannot be updated in this backward, or if a gradient would be rounded.
        """
        if stores:
            self._check_rounded(waiting)
        self._clips = self.optimizers.clip
        updater = self.optimizers.in_backward if stores else None
        self._updater = updater if updater is not None and updater.begin(waiting, order) else None
        if hooked and not {s.parameter for shard in self._shards for s in shard.formed}.isdisjoint(hooked):
            raise RuntimeError(
                "gradients of parameters with gradient hooks, and those that torch.autograd.grad returns, have the "
                "parameter's type, which is bfloat16 with store_dtype=: they would be rounded. Remove the hooks, or "
                "make the model without store_dtype"
            )
        if self._updater is not None and hooked:
            raise RuntimeError(
                f"{len(hooked)} parameters have gradient hooks, which run after the backward, but "
                f"update_in_backward uses the gradients before; remove the hooks, or pass update_in_backward=False"
            )
        self.optimizers.backwards += stores
        return self._updater is not None

    def drain(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to add the ``gradients`` of the last visit to the stored ``.grad``."""
        if self._updater is not None:
            self._unfinished[shard] = self._updater.keep(shard, gradients)
        self._send(shard, gradients)

    def update(self, shard: Shard, slot: Tensor | None = None) -> None:
        """Starts to update a shard whose gradients were drained; in the ``slot`` that holds its weights, if given."""
        assert self._updater is not None
        kept = self._unfinished.pop(shard)
        # Drain lane -> update lane. Without ``after``, a shard is updated with gradients that are not complete.
        update = self._updater.complete(shard, kept, slot, after=[arrival for arrival, _, _ in self._drains])
        if update is not None:
            if slot is not None:
                self._in_slots[slot.data_ptr()] = update
            while len(self._drains) > 1:
                # Drain lane -> compute. Without this, gradients accumulate in memory before slow storage.
                self._synchronize()
            nbytes = sum(gradient.numel() * gradient.itemsize for gradient in kept.values())
            self._meter.hold(nbytes)
            self._drains.append((update, nbytes, list(kept.values())))

    def is_updated(self, slot: Tensor) -> bool:
        """Whether an update writes to a slot."""
        return bool(self._in_slots) and slot.data_ptr() in self._in_slots

    def pop_update(self, slot: Tensor) -> list[Arrival]:
        """The update that writes to a slot, for what is about to fill it."""
        update = self._in_slots.pop(slot.data_ptr(), None)
        return [] if update is None else [update]

    def settle(self) -> None:
        """Waits until all gradients so far are stored."""
        while self._drains:
            # Drain lane -> host. Without this, an optimizer on the host reads gradients that are not stored yet.
            self._synchronize(on_host=True)

    def wait_idle(self) -> None:
        """Waits until all gradients are stored, at the end of the backward."""
        self.settle()
        self._in_slots.clear()
        # Only now: a norm is valid until the next write, and all gradients in a block share one version counter.
        for parameter, norm in self._norms.items():
            if parameter.grad is not None:
                attach_norm(parameter.grad, norm)
        self._norms.clear()
        self._end_backward()

    def add(self, parameter: nn.Parameter, stored: Tensor, gradient: Tensor) -> None:
        """Adds what autograd computed elsewhere to a gradient that was sent home in this backward."""
        # Drain lane -> host. Without this, both add to it at once.
        self.settle()
        stored.add_(gradient.to(stored.device))
        self._norms.pop(parameter, None)

    def cancel(self) -> None:
        """Resets all state after a failure, once no copy is running."""
        while self._drains:
            self._meter.release(self._drains.popleft()[1])
        self._norms.clear()
        self._in_slots.clear()
        self._unfinished.clear()
        self._end_backward(failed=True)

    def _check_rounded(self, waiting: int) -> None:
        """Raises RuntimeError if this backward, or one of the ``waiting`` ones, would add to rounded gradients."""
        types = self._shards[0].gradient_types if self._shards else GradientTypes()
        if types.dtype is None or types.accumulates:
            return
        advice = (
            f"the sum of gradients that are stored in {types.dtype} would be rounded with each of them. Use one "
            f"backward a step (micro-batches of one forward, or GradCache), or make the model with "
            f"accumulate_in_gradient_dtype=True"
        )
        if waiting:
            raise RuntimeError(
                f"{waiting} more forwards of this model still need their backward, and {advice}; or delete their "
                f"outputs"
            )
        for s in (s for shard in self._shards for s in shard.own if s.parameter.requires_grad and types.rounds(s)):
            if s.parameter.grad is not None and s.parameter.grad.dtype == types.dtype:
                raise RuntimeError(
                    f"a second backward before zero_grad(): {s.name} has a gradient already, and {advice}. Clear "
                    f"gradients by zero_grad(set_to_none=True)"
                )

    def _end_backward(self, *, failed: bool = False) -> None:
        if self._updater is not None:
            self._updater.end(failed=failed)
            self._updater = None

    def _synchronize(self, *, on_host: bool = False) -> None:
        arrival, nbytes, _gradients = self._drains[0]
        with self._meter.waiting("D", f"storing gradients to {self._tier.name}"):
            if on_host:
                arrival.synchronize()
            else:
                arrival.wait()
        self._drains.popleft()
        self._meter.release(nbytes)

    def _send(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Empties the list, so that on the host each gradient is freed as soon as it is stored."""
        given = [(g, owner, s) for g, (owner, s) in zip(gradients, shard.places, strict=True) if g is not None]
        nbytes = sum([g.numel() * g.itemsize for g, _, _ in given])
        leaving = [g.numel() * o.gradient_types.of(s).itemsize for g, o, s in given if not o.resident]
        for owner in dict.fromkeys([owner for _, owner, _ in given]):
            owner.detach_gradients()
        # Keeps device tensors until the copy is done. Without this, their memory is reused while it is read.
        in_use = [g for g, _, _ in given] if self._device.type != "cpu" else []
        del given
        norms = self._clips
        moves: deque[tuple[nn.Parameter, Callable[[], Iterable[Tensor]]]] = deque()
        taken = set[int]()
        for position in range(len(gradients)):
            gradient, gradients[position] = gradients[position], None
            if gradient is not None:
                parameter = shard.places[position][1].parameter
                moves.extend((parameter, move) for move in self._moves(shard, position, gradient, taken, norms=norms))
        gradient = None
        kind = DRAIN_TO_MEMORY if self._tier.blocking_io and self._stays_in_memory(shard) else None
        if kind is None:
            self._meter.bytes_stored += sum(leaving)
        if not moves:
            return
        self._meter.hold(nbytes)
        while self._drains:
            # Drain lane -> compute. Without this, two sets are copied at once, and two additions to one tied gradient
            # may change order. The earlier copy overlapped with a whole visit, so the wait is short.
            self._synchronize()

        def copy() -> None:
            with self._meter.on_lane("drain", f"D{shard.index}", nbytes, kind=kind):
                while moves:
                    parameter, move = moves.popleft()
                    each = [norm_of(stored) if norms else None for stored in move()]
                    if norms:
                        self._norms[parameter] = norm_of_pieces(norm for norm in each if norm is not None)
                    del move

        arrival = self._lane.submit(f"D{shard.index}", copy)
        self._drains.append((arrival, nbytes, in_use))

    def _moves(
        self, shard: Shard, position: int, gradient: Tensor, taken: set[int], *, norms: bool
    ) -> Iterator[Callable[[], Iterable[Tensor]]]:
        """The copies that store one gradient; each returns the whole stored gradient, in one or more parts.

        ``.grad`` is set at once, its bytes are written on the lane. ``taken``: where those are that stay as they came.
        """
        owner, s = shard.places[position]
        parameter = s.parameter
        stored, dtype = parameter.grad, owner.gradient_types.of(s)
        in_memory, there = self._stays_in_memory(owner), owner.on_device or not has_own_memory(self._device)
        if gradient.is_sparse or (stored is not None and stored.is_sparse):
            moved = gradient.to(parameter.device)
            set_gradient(parameter, moved if stored is None else stored + moved)  # in full: it is in no file
        elif stored is not None:
            yield partial(_add, stored, gradient)
        elif in_memory and there and gradient.device == self._device and gradient.dtype == dtype:
            # As autograd: parameters that are added have one gradient, and that of a sum is one number in all places.
            # Without this, the former is clipped twice, and nothing can be added to the latter.
            if gradient.data_ptr() in taken or 0 in gradient.stride():
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            taken.add(gradient.data_ptr())
            # A view cannot be detached in place.
            set_gradient(parameter, gradient if gradient._base is None else gradient.detach())
            # Nothing is copied beside layers that use the shard in place: ``step()`` computes these norms.
            if norms and not owner.in_place:
                yield lambda: (gradient,)
        elif in_memory and owner.blocking_io:
            place = torch.empty_strided(parameter.shape, s.stride, dtype=dtype)
            set_gradient(parameter, place)
            yield partial(_convert, place, gradient)
        else:
            block, offset, view = owner.gradient_home(s)
            set_gradient(parameter, view)
            if gradient.stride() == s.stride and (gradient.dtype == dtype or owner.gradient_types.rounds(s)):
                yield partial(_store, block, offset, gradient, dtype)
            else:
                yield partial(_convert, view, gradient)

    def _stays_in_memory(self, shard: Shard) -> bool:
        """Whether a shard's gradients stay in host memory: with all of the shard, or to be updated among the first."""
        if not shard.blocking_io:
            return True
        if self.waiting is not None:
            return shard.index in self.waiting
        if not (self.kept_bytes and any(True for _ in self.optimizers)):
            return False
        before = (s for other in self._shards[: shard.index + 1] if other.blocking_io for s in other.own)
        return sum(shard.gradient_types.nbytes(s) for s in before if s.parameter.requires_grad) <= self.kept_bytes


def _store(block: Block, offset: int, gradient: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Rounds a part at a time, since the whole would take half as much memory again."""
    for piece in (gradient,) if gradient.dtype == dtype else pieces_of(gradient):
        stored = piece.to(dtype)
        block.write(bytes_of(stored), offset)
        offset += stored.nbytes
        yield stored


def _convert(home: Tensor, gradient: Tensor) -> Iterable[Tensor]:
    if gradient.device != home.device:
        gradient = gradient.to(home.dtype)  # the copy may still run when this returns
    home.copy_(gradient, non_blocking=True)
    return (gradient if gradient.dtype == home.dtype else home,)


def _add(home: Tensor, gradient: Tensor) -> Iterable[Tensor]:
    """Adds in the stored precision, on the gradient's device."""
    if gradient.device == home.device:
        return (home.add_(gradient),)
    total = home.to(gradient.device, non_blocking=True)
    home.copy_(total.add_(gradient), non_blocking=True)
    return (total,)
