"""Makes the model of a step that the planner searches plans for, from shapes, work and rates; pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offload.advise.profile import Work
from offload.advise.rates import Rates
from offload.engine.steps import BUFFERS_SHARE
from offload.optim.update_blocks import StoredStates
from offload.partition import aligned
from offload.planning.choose import NothingFitsError, Prediction, choose, least_limit, moves, predict
from offload.planning.memory_profile import MemoryProfile
from offload.planning.step_model import Costs, OutsideBytes, StepModel, Updates

__all__ = ["UNLIMITED", "ShardBytes", "Situation", "bound_of", "shard_bytes"]

#: More than any memory has.
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class ShardBytes:
    """Bytes of one shard."""

    #: In a slot, read by a load, and stored.
    slot: int
    loaded: int
    home: int
    #: Of the gradients of what trains, with what an earlier shard stores, and without.
    gradients: int
    own_gradients: int
    #: Whether it uses parameters that an earlier one stores.
    borrows: bool


def shard_bytes(shards: Iterable[nn.Module], param_dtype: torch.dtype | None) -> list[ShardBytes]:
    """The bytes of shards, in their order. ``param_dtype``: in which they compute, if not as they are stored."""
    seen: set[nn.Parameter] = set()
    found = []
    for shard in shards:
        used = list(shard.parameters())
        own = [p for p in used if p not in seen]
        seen |= {*own}
        sizes = (param_dtype or p.dtype if p.is_floating_point() else p.dtype for p in used)
        found.append(
            ShardBytes(
                slot=sum(aligned(p.numel() * dtype.itemsize) for p, dtype in zip(used, sizes, strict=True)),
                loaded=sum(p.nbytes for p in used),
                home=sum(aligned(p.nbytes) for p in own),
                gradients=sum(p.nbytes for p in used if p.requires_grad),
                own_gradients=sum(p.nbytes for p in own if p.requires_grad),
                borrows=len(own) < len(used),
            )
        )
    return found


@dataclass(frozen=True)
class Situation:
    """What a prediction is made from."""

    shards: Sequence[ShardBytes]
    #: Of each shard, on the first micro-batch, which is the largest.
    works: Sequence[Work]
    rows: Sequence[int]
    rates: Rates
    #: Whether layers compute in another type than homes have.
    casts: bool = False
    #: Whether much larger shards have buffers of their own, as in a model with its own forward.
    apart: bool = False
    #: Of host memory, beside a device; None where layers compute there.
    host_bytes: int | None = None
    outside: OutsideBytes = field(default_factory=OutsideBytes)

    @property
    def states(self) -> float:
        """Bytes of optimizer states for each byte that trains."""
        return self.rates.states * self.rates.state_share

    @cached_property
    def home_bytes(self) -> Sequence[int]:
        """Bytes of the files of each shard: weights, gradients, optimizer states."""
        return [s.home + s.gradients + math.ceil(self.states * s.own_gradients) for s in self.shards]

    @cached_property
    def resting(self) -> Mapping[int, int]:
        """Beside a device: the shards that rest in host memory, and the bytes of each."""
        each = itertools.accumulate(self.home_bytes)
        fits = itertools.takewhile(lambda total: total <= (self.host_bytes or 0), each)
        return {j: self.home_bytes[j] for j, _ in enumerate(fits)}

    @cached_property
    def costs(self) -> Costs:
        """Seconds of each shard's work at the rates, and of a byte on each lane."""
        rates, share = self.rates, sum(self.rows) / len(self.rows) / self.rows[0]
        forward = [share * (w.forward_flops / rates.flops + w.forward_bytes / rates.touched_bytes) for w in self.works]
        kept = [share * (w.backward_flops / rates.flops + w.backward_bytes / rates.touched_bytes) for w in self.works]
        link = 1 / rates.to_device_bytes if rates.to_device_bytes else 0.0
        return Costs(
            forward=forward,
            backward=[a + b for a, b in zip(forward, kept, strict=True)],
            kept_backward=kept,
            load=max(1 / rates.read_bytes, link),
            load_from_memory=link,
            drain=max(1 / rates.write_bytes, link),
            drain_to_memory=link,
            update=1 / rates.update_bytes,
            update_in_memory=1 / rates.memory_update_bytes,
            boundary=max(1 / rates.write_bytes, link),
        )

    def step_model(self, limit_bytes: int) -> StepModel:
        """The model of a step for a limit, on which the optimizer's buffers depend."""
        shards, resting, count = self.shards, self.resting, len(self.shards)
        gradients, on_host = [s.gradients for s in shards], self.host_bytes is None
        first = next((j for j, nbytes in enumerate(gradients) if nbytes), count)
        boundaries = [0, *(w.input_bytes for w in self.works[1:]), self.works[-1].output_bytes]

        def size(shard: int, rows: float) -> int:
            return int(boundaries[shard] * rows // self.rows[0])

        return StepModel(
            shards=count,
            first=first,
            costs=self.costs,
            updates=Updates(pending=frozenset(range(first, count))),
            gradient_bytes=gradients,
            rows=self.rows,
            boundaries=size,
            gradients=size,
            recomputed={j: MemoryProfile(self.rows[0], w.saved) for j, w in enumerate(self.works)},
            kept={j: MemoryProfile(self.rows[0], w.kept) for j, w in enumerate(self.works)},
            outside=self.outside,
            slot_bytes=[s.slot for s in shards],
            own_slots=self.apart,
            loaded_bytes=[s.loaded for s in shards],
            buffer_bytes=self._buffer_bytes(limit_bytes),
            resting_bytes={
                j: s.home + math.ceil(self.states * s.own_gradients)
                for j, s in enumerate(shards)
                if on_host and not (self.casts or s.borrows)
            },
            gradients_wait=True,
            host_bytes=None if self.host_bytes is None else self.host_bytes - sum(resting.values()),
            in_host=frozenset(resting),
            updated_at_step=frozenset(resting),
        )

    def _buffer_bytes(self, limit_bytes: int) -> int:
        """Bytes of the buffers of an optimizer on the host."""
        if not self.states or self.host_bytes is not None:
            return 0
        largest = max(s.home for s in self.shards)
        # States of small parameters, which are stored in full, do not count.
        stored = StoredStates(largest, self.rates.state_share, count=self.rates.states, rounded=False)
        return stored.buffer_bytes(stored.update_block_bytes(limit_bytes // BUFFERS_SHARE))

    def at(self, limit_bytes: int) -> Prediction | None:
        """The fastest plan that fits in a limit; None where nothing fits."""
        try:
            model = self.step_model(limit_bytes)
            return predict(model, choose(model, limit_bytes))
        except ValueError:  # also NothingFitsError, and buffers that do not fit
            return None

    def least_bytes(self) -> int:
        """The least limit for which a plan is found. Buffers grow with it, so it is approached from below."""
        return least_limit(self._needed, 1)

    def _needed(self, limit_bytes: int) -> int:
        try:
            choose(self.step_model(limit_bytes), 0)
        except NothingFitsError as error:
            return error.least_bytes
        except ValueError:  # the smallest buffers are more than their share
            return limit_bytes + limit_bytes // BUFFERS_SHARE + 1
        return 0


def bound_of(prediction: Prediction) -> str:
    """What takes longest in a step: compute, or what lanes do beside it."""
    found = {"compute": prediction.forecast.compute_seconds}
    found |= {each.what: each.seconds for each in moves(prediction)}
    return max(found, key=lambda what: found[what])
