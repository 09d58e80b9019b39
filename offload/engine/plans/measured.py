"""What a model's steps have measured, as the input of a prediction: sizes, seconds per byte and per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload.engine.homes import ModelHomes
from offload.mesh.shard import MeshShard
from offload.planning.peak_memory import StepBytes
from offload.planning.simulate import Costs
from offload.planning.slot_sizes import slot_sizes
from offload.planning.step_model import StepModel
from offload.storage.buffer import has_own_memory
from offload.telemetry.statistics import DRAIN_TO_MEMORY, LOAD_FROM_MEMORY, REDUCTION, UPDATE_IN_MEMORY

__all__ = ["step_model"]


#: Time of an update in memory to that of one in files, until both were measured.
UPDATE_SHARE_IN_MEMORY = 0.4


def step_model(homes: ModelHomes, rows: Sequence[float]) -> StepModel:
    """The measured model of a step on micro-batches of so many ``rows``."""
    shards, steps, streamer, meter, tier = homes.shards, homes.steps, homes.streamer, homes.meter, homes.tier
    exchange = homes.public.exchange_bytes()  # what ranks hold on the device
    outside = replace(
        homes.outside_bytes(),
        activations=round(steps.around_per_row * sum(rows)),
        reducing=0 if exchange is None else exchange.outside,
    )
    resting_bytes = [each.weights + each.states for each in homes.bytes_in_memory()]
    mean_rows = sum(rows) / len(rows)
    loads = [sum(s.nbytes for s in shard.at_home) for shard in shards]
    gradient_bytes = [sum(s.full_nbytes for s in shard.at_home if s.parameter.requires_grad) for shard in shards]
    each = {lane: meter.copy_seconds_per_byte(lane) for lane in ("load", "drain", "update", "boundary", REDUCTION)}
    from_memory = meter.copy_seconds_per_byte(LOAD_FROM_MEMORY) or each["load"]
    to_memory = meter.copy_seconds_per_byte(DRAIN_TO_MEMORY) or each["drain"]
    # Of whole gradients, which ranks reduce. A load is measured with what it gathers.
    reduced_bytes = [shard.reduced_bytes if isinstance(shard, MeshShard) else 0 for shard in shards]
    in_memory = meter.copy_seconds_per_byte(UPDATE_IN_MEMORY) or each["update"] * UPDATE_SHARE_IN_MEMORY
    in_files = each["update"] or in_memory / UPDATE_SHARE_IN_MEMORY
    boundaries = steps.sizes(rows)
    recomputed, kept_graphs = meter.memory_profiles.nearest(max(rows)), meter.kept_profiles.nearest(max(rows))
    # Not of a smaller size than the recomputed ones, which also tell what a graph holds.
    kept_graphs = {
        j: profile
        for j, profile in kept_graphs.items()
        if profile.rows >= max(rows) or j not in recomputed or profile.rows >= recomputed[j].rows
    }
    on_host = not has_own_memory(homes.device)
    # In host memory beside a device, although homes are files; on the CPU the choice says which shards rest there.
    rests = [tier.blocking_io and not (on_host or shard.blocking_io or shard.on_device) for shard in shards]
    loading = [from_memory if there else each["load"] for there in rests]
    draining = [to_memory if there else each["drain"] for there in rests]
    updating = [in_files if tier.blocking_io and not there else in_memory for there in rests]
    backward = [meter.backward_seconds_per_row(shard.index) * mean_rows for shard in shards]
    kept = [meter.kept_backward_seconds_per_row(shard.index) * mean_rows for shard in shards]
    costs = Costs(
        load=_products(loads, loading),
        forward=[meter.forward_seconds_per_row(shard.index) * mean_rows for shard in shards],
        backward=backward,
        # One that does not recompute takes no longer, whatever disturbed it.
        kept_backward=list(map(min, kept, backward)),
        drain=_products(gradient_bytes, draining),
        waiting_drain=() if on_host else [nbytes * to_memory for nbytes in gradient_bytes],
        reduce=[nbytes * each[REDUCTION] for nbytes in reduced_bytes] if any(reduced_bytes) else (),
        update=_products(gradient_bytes, updating),
        # On a device, kernels among those of the layers.
        resting_update=[nbytes * in_memory if on_host else 0.0 for nbytes in gradient_bytes],
        updated_at_step=frozenset(j for j, there in enumerate(rests) if there or not tier.blocking_io),
        updates_fill_slots=on_host and tier.blocking_io and all(shard.slot_keeps_weights for shard in shards),
        boundary=[boundaries((j, 0)) * each["boundary"] for j in range(len(shards) + 1)],
    )
    in_place = frozenset(shard.index for shard in shards if shard.in_place)
    in_slot = [shard.slot_bytes for shard in shards]
    slot, own = slot_sizes(in_slot, streamer.slots, in_memory=in_place, apart=streamer.own_slots)
    always = on_host and not tier.blocking_io  # homes are in host memory anyway
    home_bytes = sum(resting_bytes) if always else 0
    sizes = StepBytes(
        slot_bytes=slot,
        own_slots=own,
        gradient_bytes=gradient_bytes if exchange is None else exchange.gradients,
        draining_bytes=() if exchange is None else exchange.draining,
        # In host memory a home takes gradients as they are. Those of shards that rest there are the choice's.
        gradients_stay=frozenset(range(len(shards))) if always else frozenset(),
        rows=rows,
        boundaries=boundaries,
        gradients=steps.sizes(rows, gradients=True),
        grows=steps.boundaries_grow,
        memory_profiles=recomputed,
        kept_profiles=kept_graphs,
        graph_bytes_per_row=steps.graph_bytes_per_row(),
        selected_bytes_per_row=steps.selected_bytes_per_row(),
        outside=outside,
        constant_bytes=home_bytes
        + (tier.staging_bytes if on_host else 0)
        + (0 if exchange is None else exchange.staging),
    )
    trainable = (shard.index for shard in shards if shard.trainable)
    return StepModel(
        shards=len(shards),
        first=next(trainable, len(shards)),
        costs=costs,
        sizes=sizes,
        loaded_bytes=loads,
        home_bytes=home_bytes,
        resting_bytes={
            shard.index: 0 if always else resting_bytes[shard.index]
            for shard in shards
            if shard.in_place or homes.may_rest(shard)
        },
        buffer_bytes=streamer.gradient_offload.optimizers.buffer_bytes() if on_host else 0,
        slot_bytes=in_slot,
        own_slots=streamer.own_slots,
        spills=tier.scratch() is not None,
        cast_bytes={j: sum(each.values()) for j, each in steps.cast_bytes.items()},
    )


def _products(nbytes: Sequence[int], seconds_each: Sequence[float]) -> list[float]:
    return [count * each for count, each in zip(nbytes, seconds_each, strict=True)]
