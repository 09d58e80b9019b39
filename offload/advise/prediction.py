"""Makes the model of a step that a search of plans needs, from outlines, work and rates; pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from offload.advise.outline import Layer, Outline, ParameterShape
from offload.advise.rates import OptimizerRate, Rates
from offload.advise.work import Work
from offload.engine.plans.steps import BUFFERS_SHARE
from offload.optim.update_blocks import update_block_bytes_of
from offload.planning.byte_forms import ByteForm
from offload.planning.choose import NothingFitsError, choose
from offload.planning.memory_profile import MemoryProfile
from offload.planning.partition import cut_within
from offload.planning.peak_memory import StepBytes
from offload.planning.plan import Kind
from offload.planning.planner import Updates
from offload.planning.simulate import Costs
from offload.planning.step_model import Prediction, StepModel, predict

__all__ = ["Advice", "Moved", "Shards", "Situation", "advise", "bound_of", "moved_by", "shards_of"]


#: Searches for a plan that takes less than the leanest one.
_REFINEMENTS = 4


@dataclass(frozen=True)
class Shards:
    """The shards of a model with their bytes."""

    cuts: Sequence[int]
    layers: Sequence[Sequence[Layer]]
    param_dtype: torch.dtype | None
    #: How homes store what trains.
    form: ByteForm = field(default_factory=ByteForm)

    @property
    def takes_forms(self) -> bool:
        """Whether weights can be stored in a form: all of them are float32."""
        return all(p.dtype is torch.float32 for layers in self.layers for layer in layers for p in layer.parameters)

    @property
    def casts(self) -> bool:
        """Whether slots hold another type than loads read."""
        return self.param_dtype is not (None if self.form.weights == "full" else torch.bfloat16)

    @property
    def slot_keeps_weights(self) -> bool:
        """Whether an update may take weights from a slot."""
        return not self.casts or (self.form.weights != "full" and self.param_dtype in (None, torch.float32))

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of each shard in a slot."""
        return [sum(layer.slot_bytes(self.param_dtype) for layer in layers) for layers in self.layers]

    @property
    def loaded_bytes(self) -> list[int]:
        """Bytes that each load reads from storage."""
        in_full = (sum(p.nbytes for layer in layers for p in layer.parameters) for layers in self.layers)
        return [math.ceil(self.form.load_share * nbytes) for nbytes in in_full]

    @property
    def home_bytes(self) -> list[int]:
        """Bytes of each shard's stored weights."""
        in_full = (sum(p.slot_bytes(None) for layer in layers for p in layer.own) for layers in self.layers)
        return [math.ceil(self.form.weight_share * nbytes) for nbytes in in_full]

    @property
    def gradient_bytes(self) -> list[int]:
        """Bytes of each shard's stored gradients; frozen parameters have none."""
        return [sum(p.nbytes for layer in layers for p in layer.parameters if p.trainable) for layers in self.layers]

    @property
    def stored_gradient_bytes(self) -> list[int]:
        """Bytes of each shard's gradients as stored: those of tied parameters, which several layers add to, in full."""
        tied = {p.shape for layers in self.layers for layer in layers for p in layer.borrowed}

        def stored(p: ParameterShape) -> int:
            return p.nbytes if p.shape in tied else math.ceil(self.form.gradient_share * p.nbytes)

        return [sum(stored(p) for layer in layers for p in layer.parameters if p.trainable) for layers in self.layers]

    def state_bytes(self, states: float) -> list[int]:
        """Bytes of each shard's optimizer states, for so many bytes of states for each byte of a parameter."""
        trained = [sum(p.nbytes for layer in layers for p in layer.own if p.trainable) for layers in self.layers]
        return [math.ceil(states * nbytes) for nbytes in trained]

    @property
    def borrows(self) -> list[bool]:
        """Whether a shard uses parameters that an earlier one stores."""
        return [any(layer.borrowed for layer in layers) for layers in self.layers]


def shards_of(outline: Outline, param_dtype: torch.dtype | None, limit_bytes: int | None = None) -> Shards:
    """The shards that ``OffloadModel(layers, ..., memory=...)`` makes: one a layer; small neighbours share one."""
    count = len(outline.layers)
    cuts = [1] * count
    if outline.sequential:
        cuts = cut_within([layer.slot_bytes(param_dtype) for layer in outline.layers], limit_bytes)
    ends = [0, *itertools.accumulate(cuts)]
    return Shards(cuts, [outline.layers[a:b] for a, b in itertools.pairwise(ends)], param_dtype)


@dataclass(frozen=True)
class Moved:
    """Bytes that are read from homes and written there; states, which are both, may bypass the page cache alone."""

    read: float = 0.0
    written: float = 0.0
    states: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read + other.read, self.written + other.written, self.states + other.states)

    @property
    def nbytes(self) -> float:
        """All of them."""
        return self.read + self.written + 2 * self.states

    def seconds_reading(self, rates: Rates) -> float:
        """At these rates of the disk."""
        return self.read / rates.read_bytes + self.states / rates.states_read_bytes

    def seconds_writing(self, rates: Rates) -> float:
        """The same of writing."""
        return self.written / rates.write_bytes + self.states / rates.states_write_bytes


@dataclass(frozen=True)
class Advice:
    """The fastest plan within one memory limit, or that there is none."""

    limit_bytes: int
    #: None where nothing fits.
    prediction: Prediction | None
    seconds: float = math.inf
    memory_bytes: int = 0


@dataclass(frozen=True)
class Situation:
    """What a prediction is made from."""

    shards: Shards
    works: Sequence[Work]
    rows: Sequence[int]
    optimizer: OptimizerRate
    rates: Rates
    #: Of host memory, beside a device; None where layers compute there.
    host_bytes: int | None = None

    @property
    def on_host(self) -> bool:
        """Whether layers compute in host memory."""
        return self.host_bytes is None

    @cached_property
    def resting(self) -> dict[int, int]:
        """Beside a device: the shards that rest in host memory, and the bytes of each."""
        shards, states = self.shards, self.shards.state_bytes(self.optimizer.states)
        parts = zip(shards.home_bytes, shards.stored_gradient_bytes, states, strict=True)
        each = [int(sum(part)) for part in parts]
        fits = itertools.takewhile(lambda total: total <= (self.host_bytes or 0), itertools.accumulate(each))
        return {j: each[j] for j, _ in enumerate(fits)}

    def step_model(self, limit_bytes: int) -> StepModel:
        """The model of a step for a limit, on which the optimizer's buffers depend."""
        shards, rates = self.shards, self.rates
        count, gradient_bytes = len(shards.layers), shards.gradient_bytes
        first = next((j for j, nbytes in enumerate(gradient_bytes) if nbytes), count)
        # Works are of the first micro-batch, which is the largest.
        share = sum(self.rows) / len(self.rows) / self.rows[0]
        forward = [share * self._seconds(w.forward_flops, w.forward_bytes) for w in self.works]
        kept = [share * self._seconds(w.backward_flops, w.backward_bytes) for w in self.works]
        link = 1 / rates.to_device_bytes if rates.to_device_bytes else 0.0
        slowest, slowest_back = max(1 / rates.read_bytes, link), max(1 / rates.write_bytes, link)
        resting = self.resting
        boundaries = [0, *(w.output_bytes for w in self.works)]

        def size(key: tuple[int, int]) -> int:
            return boundaries[key[0]] * self.rows[key[1]] // self.rows[0]

        costs = Costs(
            load=[nbytes * (link if j in resting else slowest) for j, nbytes in enumerate(shards.loaded_bytes)],
            forward=forward,
            backward=[a + b for a, b in zip(forward, kept, strict=True)],
            kept_backward=kept,
            drain=[
                nbytes * (link if j in resting else slowest_back)
                for j, nbytes in enumerate(shards.stored_gradient_bytes)
            ],
            waiting_drain=() if self.on_host else [nbytes * link for nbytes in shards.stored_gradient_bytes],
            update=[self._update_seconds(j) for j in range(count)],
            resting_update=[nbytes / self.optimizer.bytes_per_second for nbytes in gradient_bytes],
            boundary=[share * nbytes * slowest_back for nbytes in boundaries],
            updates_fill_slots=self._fills_slots,
            updated_at_step=frozenset(resting),
        )
        buffers = 0
        if self.optimizer.states and self.on_host:
            largest = max(replace(shards, form=ByteForm()).home_bytes, default=0)
            stored = replace(
                self.optimizer.stored,
                in_pieces=shards.form.weights != "full",
                rounded=shards.form.gradients != "full",
            )
            buffers = stored.buffer_bytes(update_block_bytes_of(largest, limit_bytes // BUFFERS_SHARE, stored))
        movable_bytes = zip(shards.home_bytes, shards.state_bytes(self.optimizer.states), strict=True)
        movable = self.on_host and not shards.casts
        return StepModel(
            shards=count,
            first=first,
            costs=costs,
            sizes=StepBytes(
                slot_bytes=max(shards.slot_bytes),
                gradient_bytes=gradient_bytes,
                rows=self.rows,
                boundaries=size,
                gradients=size,
                memory_profiles={j: MemoryProfile(self.rows[0], w.saved) for j, w in enumerate(self.works)},
                kept_profiles={j: MemoryProfile(self.rows[0], w.kept) for j, w in enumerate(self.works)},
            ),
            buffer_bytes=buffers,
            updates=Updates(pending=frozenset(range(first, count)), updates=False, clips=False),
            resting_bytes={
                j: weights + states
                for j, (weights, states) in enumerate(movable_bytes)
                if movable and not shards.borrows[j]
            },
            gradients_wait=True,
            host_bytes=None if self.host_bytes is None else self.host_bytes - sum(resting.values()),
            in_host=frozenset(resting),
        )

    def _seconds(self, flops: float, nbytes: float) -> float:
        return flops / self.rates.flops + nbytes / self.rates.touched_bytes

    def update_bytes(self, shard: int) -> Moved:
        """What the update of a shard moves; its weights are those of the load that follows, if a slot keeps them."""
        in_full, form = self.shards.gradient_bytes[shard], self.shards.form
        weights = form.lower_share + (0.0 if self._fills_slots else form.load_share)
        return Moved(
            read=self.shards.stored_gradient_bytes[shard] + weights * in_full,
            written=form.weight_share * in_full,
            states=self.optimizer.states * in_full,
        )

    @property
    def _fills_slots(self) -> bool:
        return self.on_host and self.shards.slot_keeps_weights

    def _update_seconds(self, shard: int) -> float:
        """Of reading and writing for the update of a shard, or of its arithmetic, whichever takes longer."""
        moved, rates = Moved() if shard in self.resting else self.update_bytes(shard), self.rates
        seconds = moved.seconds_reading(rates) + moved.seconds_writing(rates)
        return max(self.shards.gradient_bytes[shard] / self.optimizer.bytes_per_second, seconds)

    def at(self, limit_bytes: int) -> Advice:
        """The fastest plan that fits in a limit."""
        try:
            model = self.step_model(limit_bytes)
            prediction = predict(model, choose(model, limit_bytes))
        except ValueError:  # also NothingFitsError, and buffers that do not fit
            return Advice(limit_bytes, None)
        return Advice(limit_bytes, prediction, prediction.seconds, prediction.memory_bytes)

    def least_bytes(self) -> int:
        """The least limit for which a plan is found. Buffers grow with it, so it is approached from below."""
        unlimited = 1 << 62
        limit = self._needed(unlimited) - self.step_model(unlimited).buffer_bytes
        while True:
            try:
                needed = self._needed(limit)
            except ValueError:  # the smallest buffers are more than their share
                needed = limit + limit // BUFFERS_SHARE + 1
            if needed <= limit:
                break
            limit = needed
        for _ in range(_REFINEMENTS):  # spilling every boundary is not always the least
            less = self.at(limit - 1).prediction
            # What it takes may be too little as a limit, of which buffers get a share.
            if less is None or self.at(less.memory_bytes).prediction is None:
                break
            limit = less.memory_bytes
        return limit

    def _needed(self, limit_bytes: int) -> int:
        try:
            choose(self.step_model(limit_bytes), 0)
        except NothingFitsError as error:
            return error.least_bytes
        return 0

    def most_bytes(self) -> int:
        """Bytes that the fastest plan takes if memory has no limit."""
        limit = 1 << 62
        model = self.step_model(limit)
        return predict(model, choose(model, limit)).memory_bytes


def advise(situation: Situation, limit_bytes: int) -> list[tuple[str, Advice]]:
    """The plans of the given limit, of the least possible, of the double, and of as much as is of use."""
    least, most = situation.least_bytes(), situation.most_bytes()
    rows: list[tuple[str, int]] = [("given", limit_bytes), ("least", least), ("double", 2 * limit_bytes), ("all", most)]
    return [(name, situation.at(limit)) for name, limit in rows]


def moved_by(situation: Situation, advice: Advice) -> tuple[Moved, Moved]:
    """What loads and drains of a step read and write, and what its updates do; boundaries do not count."""
    prediction = advice.prediction
    assert prediction is not None
    shards = situation.shards
    in_memory, waiting = prediction.choice.in_memory | situation.resting.keys(), prediction.choice.waiting
    kinds = {kind: [a.shard for a in prediction.plan.actions if a.kind is kind] for kind in Kind}
    stored, loaded = shards.stored_gradient_bytes, shards.loaded_bytes
    drained = (j for j in kinds[Kind.DRAIN] if j not in in_memory | waiting)
    read = sum(loaded[j] for j in kinds[Kind.LOAD] if j not in in_memory)
    copies = Moved(read=read, written=sum(stored[j] for j in drained))
    updates = Moved()
    for j in kinds[Kind.UPDATE]:
        if j not in in_memory:
            each = situation.update_bytes(j)
            updates += replace(each, read=each.read - (stored[j] if j in waiting else 0))
    return copies, updates


def bound_of(situation: Situation, advice: Advice) -> str:
    """Which of compute, copies to a device, reads, writes and updates takes longest."""
    prediction = advice.prediction
    assert prediction is not None
    copies, updates = moved_by(situation, advice)
    rates, gradients = situation.rates, situation.shards.gradient_bytes
    link = rates.to_device_bytes or math.inf
    copying = replace(rates, read_bytes=min(rates.read_bytes, link), write_bytes=min(rates.write_bytes, link))
    updated = (action.shard for action in prediction.plan.actions if action.kind is Kind.UPDATE)
    loaded = sum(situation.shards.loaded_bytes[a.shard] for a in prediction.plan.actions if a.kind is Kind.LOAD)
    found = {
        "compute": prediction.compute_seconds,
        "copying": loaded / link,
        "reading": copies.seconds_reading(copying) + updates.seconds_reading(rates),
        "writing": copies.seconds_writing(copying) + updates.seconds_writing(rates),
        "updating": sum(gradients[j] for j in updated) / situation.optimizer.bytes_per_second,
    }
    return max(found, key=lambda name: found[name])
