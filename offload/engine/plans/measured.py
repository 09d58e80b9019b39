"""What a model's steps have measured, as the input of a prediction: sizes, seconds per byte and per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.engine.homes import ModelHomes
from offload.engine.plans.between_steps import in_host_memory
from offload.mesh.shard import MeshShard
from offload.planning.step_model import Costs, StepModel
from offload.storage.buffer import has_own_memory
from offload.telemetry.statistics import DRAIN_TO_MEMORY, LOAD_FROM_MEMORY, REDUCTION, UPDATE_IN_MEMORY

__all__ = ["step_model"]


#: Time of an update in memory to that of one in files, until both were measured.
UPDATE_SHARE_IN_MEMORY = 0.4


def step_model(homes: ModelHomes, rows: Sequence[float]) -> StepModel:
    """The measured model of a step on micro-batches of so many ``rows``."""
    shards, steps, tier, streamer = homes.shards, homes.steps, homes.tier, homes.streamer
    exchange = homes.public.exchange_bytes()  # what ranks hold on the device
    on_host, everything = not has_own_memory(homes.device), range(len(shards))
    always = on_host and not tier.blocking_io  # homes are in host memory anyway
    there = [each.weights + each.states for each in homes.bytes_in_memory()]
    gradients = [sum(s.full_nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    # Of whole gradients, which ranks reduce. A load is measured with what it gathers.
    reduced = [shard.reduced_bytes if isinstance(shard, MeshShard) else 0 for shard in shards]
    recomputed, kept = homes.meter.profiles(max(rows), steps.graph_bytes_per_row())
    in_host = in_host_memory(homes)
    return StepModel(
        shards=len(shards),
        first=next((shard.index for shard in shards if shard.trainable), len(shards)),
        costs=_costs(homes, sum(rows) / len(rows)),
        updates=streamer.gradient_offload.optimizers.planned(),
        rows=rows,
        slot_bytes=[shard.slot_bytes for shard in shards],
        loaded_bytes=[sum(s.nbytes for s in shard.at_home) for shard in shards],
        own_slots=streamer.own_slots,
        gradient_bytes=gradients if exchange is None else exchange.gradients,
        draining_bytes=() if exchange is None else exchange.draining,
        reduced_bytes=reduced if any(reduced) else (),
        stored_bytes=gradients,
        boundaries=steps.boundaries.of(rows),
        gradients=steps.gradients.of(rows),
        spills=tier.scratch() is not None,
        grows=steps.boundaries_grow,
        recomputed=recomputed,
        kept=kept,
        selected_bytes_per_row={j: sum(each.values()) for j, each in steps.selected_per_row.items()},
        cast_bytes={j: sum(each.values()) for j, each in steps.cast_bytes.items()},
        resting_bytes={s.index: 0 if always else there[s.index] for s in shards if s.in_place or homes.may_rest(s)},
        home_bytes=sum(there) if always else 0,
        transfer_bytes=(tier.staging_bytes if on_host else 0) + (0 if exchange is None else exchange.staging),
        buffer_bytes=streamer.gradient_offload.optimizers.buffer_bytes() if on_host else 0,
        outside=replace(
            homes.outside_bytes(),
            activations=round(steps.around_per_row * sum(rows)),
            reducing=0 if exchange is None else exchange.outside,
        ),
        # In host memory a home takes gradients as they are. Those of shards that rest there are the choice's.
        gradients_stay=frozenset(everything if always else ()),
        in_host=in_host,
        updated_at_step=in_host if tier.blocking_io else frozenset(everything),
        updates_fill_slots=on_host and tier.blocking_io and all(shard.slot_keeps_weights for shard in shards),
    )


def _costs(homes: ModelHomes, rows: float) -> Costs:
    """For cells of so many rows."""
    meter, on_host = homes.meter, not has_own_memory(homes.device)
    load, drain, update, boundary, reduce = map(
        meter.copy_seconds_per_byte, ("load", "drain", "update", "boundary", REDUCTION)
    )
    update_there = meter.copy_seconds_per_byte(UPDATE_IN_MEMORY) or update * UPDATE_SHARE_IN_MEMORY
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
        update=update or update_there / UPDATE_SHARE_IN_MEMORY,
        update_in_memory=update_there,
        # On a device, kernels among those of the layers.
        resting_update=update_there if on_host else 0.0,
        boundary=boundary,
        reduce=reduce,
    )
