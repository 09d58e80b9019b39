"""Predicts steps of a model from what its steps have measured: sizes, seconds per byte and per row.

Where layers compute on a device of its own and homes are files, host memory holds no activations: shards rest in it as
far as it reaches, the first ones of a forward first, and gradients of the others wait there for their update. Loads
then come from memory instead of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from offload.engine.homes import ModelHomes
from offload.planner.outside import outside_bytes
from offload.planning.choose import predict
from offload.planning.plan import Kind, Plan
from offload.planning.planner import plan_step
from offload.planning.step_model import Choice, Costs, StepModel
from offload.storage.buffer import has_own_memory
from offload.streaming.shard import Shard
from offload.telemetry.statistics import DRAIN_TO_MEMORY, LOAD_FROM_MEMORY, UPDATE_IN_MEMORY
from offload.units import shown_record

__all__ = [
    "Estimate",
    "bytes_left",
    "costs_of",
    "holds_gradients",
    "in_host_memory",
    "next_plan",
    "predict_step",
    "shards_that_fit",
    "step_model",
    "unowned_gradients",
]


def step_model(homes: ModelHomes, rows: Sequence[float]) -> StepModel:
    """The measured model of a step on micro-batches of so many ``rows``."""
    shards, steps, tier, streamer = homes.shards, homes.steps, homes.tier, homes.streamer
    exchange = homes.public.exchange_bytes()  # what ranks hold on the device
    on_host, everything = not has_own_memory(homes.device), range(len(shards))
    always = on_host and not tier.blocking_io  # homes are in host memory anyway
    there = [each.weights + each.states for each in homes.bytes_in_memory()]
    gradients = [sum(s.full_nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    recomputed, kept = homes.meter.profiles(max(rows), steps.graph_bytes_per_row())
    in_host = in_host_memory(homes)
    return StepModel(
        shards=len(shards),
        first=next((shard.index for shard in shards if shard.trainable), len(shards)),
        costs=costs_of(homes, rows),
        updates=streamer.gradient_offload.optimizers.planned(),
        rows=rows,
        slot_bytes=[shard.slot_bytes for shard in shards],
        loaded_bytes=[sum(s.nbytes for s in shard.at_home) for shard in shards],
        own_slots=streamer.own_slots,
        gradient_bytes=gradients if exchange is None else exchange.gradients,
        draining_bytes=() if exchange is None else exchange.draining,
        stored_bytes=gradients,
        boundaries=steps.boundaries.now(),
        gradients=steps.gradients.now(),
        spills=tier.scratch() is not None,
        grows=steps.boundaries_grow,
        recomputed=recomputed,
        kept=kept,
        selected_bytes_per_row={j: sum(each.values()) for j, each in steps.selected_per_row.items()},
        cast_bytes={j: sum(each.values()) for j, each in steps.cast_bytes.items()},
        resting_bytes={s.index: 0 if always else there[s.index] for s in shards if s.in_place or _may_rest(homes, s)},
        home_bytes=sum(there) if always else 0,
        transfer_bytes=(tier.staging_bytes if on_host else 0) + (0 if exchange is None else exchange.staging),
        buffer_bytes=streamer.gradient_offload.optimizers.buffer_bytes() if on_host else 0,
        outside=replace(
            outside_bytes(homes),
            activations=round(steps.around_per_row * sum(rows)),
            reducing=0 if exchange is None else exchange.outside,
        ),
        # In host memory a home takes gradients as they are. Those of shards that rest there are the choice's.
        gradients_stay=always,
        in_host=in_host,
        updated_at_step=in_host if tier.blocking_io else frozenset(everything),
    )


def _may_rest(homes: ModelHomes, shard: Shard) -> bool:
    """Whether a shard can rest in the memory that layers compute in.

    On a device with memory of its own if all that it trains is updated by an ``OffloadOptimizer``: states of others
    would not follow it. Not if these states are encoded, which the host does, or have another type than their
    parameter, which ``load_state_dict`` of torch would give them where they move to another device.
    """
    if not has_own_memory(homes.device) or not shard.may_bind_in_place:
        return shard.may_bind_in_place
    if homes.public.sharded or shard.formed or shard.quantised:
        return False
    trained = {s.parameter for s in shard.own if s.parameter.requires_grad}
    optimizers = homes.streamer.gradient_offload.optimizers
    if trained and (homes.policy.update_on == "host" or any(o.factory.form is not None for o in optimizers)):
        return False
    blocks = [block for o in optimizers for block in o.param_blocks.get(shard, ())]
    for block in blocks:
        for proxy, state in zip(block.proxies, block.states(), strict=True):
            values = (x for key, x in state.items() if key != "step" and isinstance(x, Tensor))
            if any(x.is_floating_point() and x.dtype != proxy.dtype for x in values):
                return False
    return trained <= {p for block in blocks for p in block.parameters}


def costs_of(homes: ModelHomes, microbatches: Sequence[float]) -> Costs:
    """The measured seconds of a step on micro-batches of so many rows."""
    meter, on_host, rows = homes.meter, not has_own_memory(homes.device), sum(microbatches) / len(microbatches)
    load, drain, update, boundary = map(meter.copy_seconds_per_byte, ("load", "drain", "update", "boundary"))
    update_there = meter.copy_seconds_per_byte(UPDATE_IN_MEMORY) or update
    backward = [rows * meter.backward_seconds_per_row(shard.index) for shard in homes.shards]
    return Costs(
        forward=[rows * meter.forward_seconds_per_row(shard.index) for shard in homes.shards],
        backward=backward,
        # One that does not recompute takes no longer, whatever disturbed it.
        kept_backward=[min(each, rows * meter.kept_backward_seconds_per_row(j)) for j, each in enumerate(backward)],
        load=load,
        load_from_memory=meter.copy_seconds_per_byte(LOAD_FROM_MEMORY) or load,
        drain=drain,
        drain_to_memory=0.0 if on_host else meter.copy_seconds_per_byte(DRAIN_TO_MEMORY) or drain,
        update=update or update_there,
        update_in_memory=update_there,
        boundary=boundary,
    )


# --- what is in host memory between two steps -------------------------------------------------------------------------


def in_host_memory(homes: ModelHomes) -> frozenset[int]:
    """The shards that rest in host memory although their homes are files."""
    return frozenset(shard.index for shard in homes.shards if shard.file is not None and not shard.on_device)


def bytes_left(homes: ModelHomes, host_bytes: int) -> int:
    """Of ``host_bytes``, those that shards in host memory and buffers of transfers and updates leave."""
    each = homes.bytes_in_memory()
    return max(0, host_bytes - _buffer_bytes(homes) - sum(each[j].total for j in in_host_memory(homes)))


def shards_that_fit(homes: ModelHomes, host_bytes: int, resident_bytes: int | None) -> set[int]:
    """The shards that may rest in so much host memory, together in no more than ``resident_bytes``."""
    awaits = homes.streamer.gradient_offload.optimizers.awaits_states()
    left = host_bytes - _buffer_bytes(homes)
    left = left if resident_bytes is None else min(left, resident_bytes)
    found: set[int] = set()
    for shard, each in zip(homes.shards, homes.bytes_in_memory(), strict=True):
        # Before its first update, a shard's states have no size yet, and would come into memory with it.
        if (awaits and shard.trainable and shard.file is None) or shard.on_device:
            continue
        left -= each.total
        if left < 0:
            break
        found.add(shard.index)
    return found


def _buffer_bytes(homes: ModelHomes) -> int:
    return homes.tier.staging_bytes + homes.streamer.gradient_offload.optimizers.buffer_bytes()


def unowned_gradients(shard: Shard) -> list[Tensor]:
    """The gradients of a shard that no pending update owns: accumulated ones, or zeros."""
    return [] if shard.pending is not None else [s.parameter.grad for s in shard.own if s.parameter.grad is not None]


def holds_gradients(shard: Shard) -> bool:
    """Whether gradients of a shard are in host memory, for the next backward or a pending update."""
    if not shard.blocking_io:  # those that rest there may be updated at any time
        return shard.pending is not None or bool(unowned_gradients(shard))
    jobs = () if shard.pending is None else shard.pending.tasks
    pending = [gradient for job in jobs for gradient in job.gradients if gradient is not None]
    return any(
        gradient.is_sparse or not any(region.holds(gradient) for region in shard.gradient_regions)
        for gradient in (*unowned_gradients(shard), *pending)
    )


# --- predictions of steps that did not run yet ------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Prediction for one step, forward and backward; ``print()`` shows it as a table."""

    #: Seconds of forward and backward, in each of which compute or a lane of copies takes longest; with the updates of
    #: an ``OffloadOptimizer``, without any other optimizer, and without the user's loss.
    seconds: float
    #: Of these, seconds in which compute waits for a copy.
    wait_seconds: float
    #: Seconds inside layers.
    compute_seconds: float
    #: Bytes that the step reads from homes, and bytes of gradients that it writes there.
    bytes_loaded: int
    bytes_stored: int
    #: At home: parameters, gradients, and boundaries that are written out.
    home_bytes: int
    #: The most bytes at one time in the memory that layers compute in: slots, boundaries, activations and all else;
    #: where that is host memory, homes in host memory with their optimizer states included. With ``memory``, also what
    #: the latest steps took beside these: buffers inside of operations, and on the CPU those of the allocator.
    memory_bytes: int

    def __str__(self) -> str:
        return shown_record(self)


def next_plan(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> Plan:
    """The plan of the next step from empty slots, on micro-batches of so many rows."""
    return plan_step(*_next_step(homes, rows, training=training))


def _next_step(homes: ModelHomes, rows: Sequence[float], *, training: bool) -> tuple[StepModel, Choice]:
    steps, streamer, model = homes.steps, homes.streamer, step_model(homes, rows)
    updates = model.updates._replace(pending=frozenset()) if streamer.updates_at_once else model.updates
    choice = Choice(
        streamer.slots,
        streamer.in_place(),
        steps.kept_cells(rows, model.first),
        # Without recomputation boundaries are kept by the graphs.
        steps.boundary_budget_bytes if homes.recompute else math.inf,
        frozenset(streamer.gradient_offload.waiting or ()),
    )
    return replace(model, updates=updates, first=model.first if training else model.shards), choice


def predict_step(homes: ModelHomes, rows: Sequence[float]) -> Estimate:
    """Predicts the next step, on micro-batches of so many rows."""
    shards, meter = homes.shards, homes.meter
    seen = all(meter.backward_seconds_per_row(shard.index) for shard in shards if shard.trainable)
    model, choice = _next_step(homes, rows, training=True)
    if not seen or (len(choice.in_memory) < len(shards) and not meter.bytes_loaded):
        raise RuntimeError("run one training step first: estimate() predicts from the bandwidths that it measures")
    if homes.steps.planner is not None:
        model = homes.steps.planner.observed(model)
    predicted, each = predict(model, choice), homes.bytes_in_memory()
    stored = [
        sum(shard.gradient_types.nbytes(s) for s in shard.at_home if s.parameter.requires_grad) for shard in shards
    ]
    at_home = [each[shard.index] for shard in shards if shard.blocking_io == homes.tier.blocking_io]
    return Estimate(
        *predicted.forecast,
        bytes_loaded=sum(model.loaded_bytes[j] for j in predicted.plan.loads),
        bytes_stored=sum(stored[a.shard] for a in predicted.plan.actions if a.kind is Kind.DRAIN),
        home_bytes=sum(there.weights + there.gradients for there in at_home) + predicted.peak.spilled,
        memory_bytes=predicted.memory_bytes,
    )
