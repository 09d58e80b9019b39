"""What a model's steps have measured, as the input of a prediction: sizes, seconds per byte and per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.engine.homes import ModelHomes
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
    on_host = not has_own_memory(homes.device)
    always = on_host and not tier.blocking_io  # homes are in host memory anyway
    resting = [each.weights + each.states for each in homes.bytes_in_memory()]
    gradients = [sum(s.full_nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    loads = [sum(s.nbytes for s in shard.at_home) for shard in shards]
    recomputed, kept = homes.meter.profiles(max(rows), steps.graph_bytes_per_row())
    outside = homes.outside_bytes()
    return StepModel(
        shards=len(shards),
        first=next((shard.index for shard in shards if shard.trainable), len(shards)),
        costs=_costs(homes, rows, loads, gradients),
        rows=rows,
        slot_bytes=[shard.slot_bytes for shard in shards],
        loaded_bytes=loads,
        own_slots=streamer.own_slots,
        gradient_bytes=gradients if exchange is None else exchange.gradients,
        draining_bytes=() if exchange is None else exchange.draining,
        boundaries=steps.boundaries.of(rows),
        gradients=steps.gradients.of(rows),
        spills=tier.scratch() is not None,
        grows=steps.boundaries_grow,
        recomputed=recomputed,
        kept=kept,
        selected_bytes_per_row={j: sum(each.values()) for j, each in steps.selected_per_row.items()},
        cast_bytes={j: sum(each.values()) for j, each in steps.cast_bytes.items()},
        resting_bytes={
            shard.index: 0 if always else resting[shard.index]
            for shard in shards
            if shard.in_place or homes.may_rest(shard)
        },
        home_bytes=sum(resting) if always else 0,
        transfer_bytes=(tier.staging_bytes if on_host else 0) + (0 if exchange is None else exchange.staging),
        buffer_bytes=streamer.gradient_offload.optimizers.buffer_bytes() if on_host else 0,
        outside=replace(
            outside,
            activations=round(steps.around_per_row * sum(rows)),
            reducing=0 if exchange is None else exchange.outside,
        ),
        # In host memory a home takes gradients as they are. Those of shards that rest there are the choice's.
        gradients_stay=frozenset(range(len(shards))) if always else frozenset(),
    )


def _costs(homes: ModelHomes, rows: Sequence[float], loads: Sequence[int], gradients: Sequence[int]) -> Costs:
    shards, meter, tier = homes.shards, homes.meter, homes.tier
    on_host, mean_rows, boundaries = (
        not has_own_memory(homes.device),
        sum(rows) / len(rows),
        homes.steps.boundaries.of(rows),
    )
    load, drain, update, boundary, reduction = map(
        meter.copy_seconds_per_byte, ("load", "drain", "update", "boundary", REDUCTION)
    )
    load_there = meter.copy_seconds_per_byte(LOAD_FROM_MEMORY) or load
    drain_there = meter.copy_seconds_per_byte(DRAIN_TO_MEMORY) or drain
    update_there = meter.copy_seconds_per_byte(UPDATE_IN_MEMORY) or update * UPDATE_SHARE_IN_MEMORY
    update = update or update_there / UPDATE_SHARE_IN_MEMORY
    # In host memory beside a device, although homes are files; on the CPU the choice says which shards rest there.
    rests = [tier.blocking_io and not (on_host or shard.blocking_io or shard.on_device) for shard in shards]
    # Of whole gradients, which ranks reduce. A load is measured with what it gathers.
    reduced = [shard.reduced_bytes if isinstance(shard, MeshShard) else 0 for shard in shards]
    backward = [meter.backward_seconds_per_row(shard.index) * mean_rows for shard in shards]
    return Costs(
        load=[n * (load_there if there else load) for n, there in zip(loads, rests, strict=True)],
        forward=[meter.forward_seconds_per_row(shard.index) * mean_rows for shard in shards],
        backward=backward,
        # One that does not recompute takes no longer, whatever disturbed it.
        kept_backward=[
            min(each, meter.kept_backward_seconds_per_row(j) * mean_rows) for j, each in enumerate(backward)
        ],
        drain=[n * (drain_there if there else drain) for n, there in zip(gradients, rests, strict=True)],
        waiting_drain=() if on_host else [n * drain_there for n in gradients],
        reduce=[n * reduction for n in reduced] if any(reduced) else (),
        update=[
            n * (update if tier.blocking_io and not there else update_there)
            for n, there in zip(gradients, rests, strict=True)
        ],
        # On a device, kernels among those of the layers.
        resting_update=[n * update_there if on_host else 0.0 for n in gradients],
        updated_at_step=frozenset(j for j, there in enumerate(rests) if there or not tier.blocking_io),
        updates_fill_slots=on_host and tier.blocking_io and all(shard.slot_keeps_weights for shard in shards),
        boundary=[boundaries((j, 0)) * boundary for j in range(len(shards) + 1)],
    )
