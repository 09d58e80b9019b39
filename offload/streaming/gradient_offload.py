"""The way home of gradients: from where a visit left them on the compute device into the homes' ``.grad``.

A ``.grad`` that is None takes the first gradient as it is; what rests there already is added to, in the home's
precision. On the way a gradient may be noted (its norm), or kept back for an optimizer that updates its shard at once.

Guarantees
    * One set of gradients is on its way while the next is being summed, never more: gradients do not pile up before a
      slow home, and two additions to one tied gradient keep their order.
    * After :meth:`GradientOffload.wait_idle` every gradient is home. After :meth:`GradientOffload.cancel` none is on
      its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offload.storage import Block, Tier
from offload.storage.contract import bytes_of
from offload.streaming.grad_norm import norm_of, note
from offload.streaming.lane import Arrival, Lane, error_context
from offload.streaming.optimizers import Optimizers
from offload.streaming.shard import Shard, Slice
from offload.telemetry.statistics import Meter

if TYPE_CHECKING:
    from offload.optim.in_backward import InBackward

__all__ = ["GradientOffload"]


class GradientOffload:
    """Brings the gradients of one model home."""

    def __init__(self, shards: Sequence[Shard], *, device: torch.device, tier: Tier, lane: Lane, meter: Meter) -> None:
        self._shards = shards
        self._device = device
        self._tier = tier
        self._lane = lane
        self._meter = meter
        self._drains: deque[tuple[Arrival, int, list[Tensor]]] = deque()
        #: What asks for norms of gradients, for gradients that wait in memory, and for updates during backward.
        self.optimizers = Optimizers()
        #: Norms of gradients on their way.
        self._norms: list[tuple[nn.Parameter, Tensor]] = []
        #: What updates shards during this backward, if it does; and what it keeps of the shards that it has yet to.
        self._updater: InBackward | None = None
        self._updates = False
        self._kept: dict[Shard, dict[Slice, Tensor]] = {}
        #: Whose gradients do not go home, and what has come of them; whether all others are dropped.
        self._handed_over: Collection[nn.Parameter] = ()
        self._taken: dict[nn.Parameter, Tensor] = {}
        self._only_those = False

    def begin(self, waiting: int, handed_over: Collection[nn.Parameter] = (), *, only_those: bool = False) -> bool:
        """A backward begins; says whether its plan is to update each shard.

        Args:
            waiting: other forwards that wait for their backward.
            handed_over: parameters whose gradients :meth:`take` returns, instead of adding them to those at home.
            only_those: drop all other gradients of parameters.

        Raises:
            RuntimeError: if a shard cannot be updated in this backward.
        """
        self._updater = None if only_those else self.optimizers.in_backward
        self._updates = self._updater is not None and self._updater.begin(waiting)
        if self._updates and handed_over:
            self._end(failed=True)
            raise RuntimeError(
                f"{len(handed_over)} parameters have hooks on their gradients, which run after the backward, but "
                f"update_in_backward has used the gradients by then; remove the hooks, or use update_in_backward=False"
            )
        self._handed_over, self._only_those, self._taken = frozenset(handed_over), only_those, {}
        return self._updates

    def drain(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to add ``gradients``, as the last visit left them, to the homes' ``.grad``."""
        if self._updates:
            assert self._updater is not None
            self._kept[shard] = self._updater.keep(shard, gradients)
        self._send(shard, gradients)

    def update(self, shard: Shard) -> None:
        """Starts to update a shard whose gradients were drained."""
        assert self._updater is not None
        kept = self._kept.pop(shard)
        # Drain lane -> update lane. Without ``after``, a shard is updated with gradients that are not complete.
        update = self._updater.complete(shard, kept, after=[arrival for arrival, _, _ in self._drains])
        if update is not None:
            while len(self._drains) > 1:
                # Drain lane -> compute. Without this, gradients pile up before a slow home.
                self._synchronize()
            nbytes = _nbytes(kept.values())
            self._meter.hold(nbytes)
            self._drains.append((update, nbytes, list(kept.values())))

    def wait_idle(self) -> None:
        """Waits until all gradients are home: the backward is over."""
        while self._drains:
            # Drain lane -> host. Without this, an optimizer on the host reads gradients that have not arrived.
            self._synchronize(on_host=True)
        # Only now: a note counts until the next write, and a block's writes are counted together.
        for parameter, norm in self._norms:
            if parameter.grad is not None:
                note(parameter.grad, norm)
        self._norms.clear()
        self._end()

    def take(self) -> dict[nn.Parameter, Tensor]:
        """The gradients of the last backward that were to be handed over, in type and place as at home."""
        taken, self._taken = self._taken, {}
        return {p: gradient.to(p.device, p.dtype) for p, gradient in taken.items()}

    def cancel(self) -> None:
        """After a failure, when nothing is on its way any more: forgets it."""
        while self._drains:
            self._meter.release(self._drains.popleft()[1])
        self._norms.clear()
        self._kept.clear()
        self._taken = {}
        self._end(failed=True)

    def _end(self, *, failed: bool = False) -> None:
        self._updates = False
        self._handed_over, self._only_those = (), False
        if self._updater is not None:
            self._updater.end(failed=failed)
            self._updater = None

    def _synchronize(self, *, on_host: bool = False) -> None:
        arrival, nbytes, _gradients = self._drains[0]
        with self._meter.waiting("D"), error_context(f"storing gradients to {self._tier.name}"):
            if on_host:
                arrival.synchronize()
            else:
                arrival.wait()
        self._drains.popleft()
        self._meter.release(nbytes)

    # --- what is copied where -----------------------------------------------------------------------------------

    def _take(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Takes out of the list what does not go home: what is handed over, and what is dropped."""
        if not self._handed_over and not self._only_those:
            return
        for position, gradient in enumerate(gradients):
            parameter = shard.slices[position].parameter
            if gradient is not None and parameter in self._handed_over:
                sum_so_far = self._taken.get(parameter)
                self._taken[parameter] = gradient if sum_so_far is None else sum_so_far + gradient
                gradients[position] = None
            elif self._only_those:
                gradients[position] = None

    def _send(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Takes the gradients out of the list: on the host each is free as soon as it is home."""
        self._take(shard, gradients)
        nbytes = _nbytes(gradient for gradient in gradients if gradient is not None)
        for owner in {shard.owner_of(position)[0] for position, g in enumerate(gradients) if g is not None}:
            owner.detach_gradients()
        # On a device the tensors stay until the copy is done. Without this, their memory is reused while it is read.
        staying = [g for g in gradients if g is not None] if self._device.type != "cpu" else []
        moves: deque[tuple[nn.Parameter, Callable[[], Tensor]]] = deque()
        for position in range(len(gradients)):
            gradient, gradients[position] = gradients[position], None
            if gradient is not None:
                parameter = shard.owner_of(position)[1].parameter
                moves.extend((parameter, move) for move in self._moves(shard, position, gradient))
        gradient = None
        if not (self._tier.blocking_io and self._waits_in_memory(shard)):
            self._meter.bytes_stored += nbytes
        if not moves:
            return
        self._meter.hold(nbytes)
        while self._drains:
            # Drain lane -> compute. Without this, more than one set is on its way, and two additions to one tied
            # gradient may change places. The copy has had a whole visit's time, so the wait is short.
            self._synchronize()

        norms = self.optimizers.clip

        def copy() -> None:
            with self._meter.on_lane("drain", f"D{shard.index}", nbytes):
                while moves:
                    parameter, move = moves.popleft()
                    total = move()
                    if norms and not total.is_sparse:
                        self._norms.append((parameter, norm_of(total)))
                    del move, total

        arrival = self._lane.submit(f"D{shard.index}", copy)
        self._drains.append((arrival, nbytes, staying))

    def _moves(self, shard: Shard, position: int, gradient: Tensor) -> Iterator[Callable[[], Tensor]]:
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
            if self.optimizers.clip:
                yield lambda: gradient
        elif self._tier.blocking_io and self._waits_in_memory(owner):
            if gradient.device.type == "cpu" and gradient.dtype == parameter.dtype:
                parameter.grad = gradient
                if self.optimizers.clip:
                    yield lambda: gradient
            else:
                host = torch.empty_strided(parameter.shape, s.stride, dtype=parameter.dtype)
                parameter.grad = host
                yield partial(_convert, host, gradient)
        else:
            block, offset, view = owner.gradient_home(s, self._tier)
            parameter.grad = view
            if gradient.stride() == s.stride and gradient.dtype == parameter.dtype:
                yield partial(_store, block, offset, gradient)
            else:
                yield partial(_convert, view, gradient)

    def _waits_in_memory(self, shard: Shard) -> bool:
        """Whether the gradients of a shard need not go to disk: those of the first shards, which are updated first."""
        most = self.optimizers.gradient_bytes
        if not most:
            return False
        before = (s for other in self._shards[: shard.index + 1] for s in other.own if s.parameter.requires_grad)
        return sum(s.nbytes for s in before) <= most


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
