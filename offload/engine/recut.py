"""Cuts a model into other shards between steps, over the same bytes: nothing is moved or copied.

::

    new shards, runners, param blocks        commit
    -------------------------------> both ----------> the new ones

Parameters, their gradients and optimizer states stay the same objects with the same values. What was measured of the
shards before is forgotten: the next step is measured as the first one is.

Guarantees
    * A failure before the commit changes nothing. A commit that is interrupted is completed.
    * Memory that other code refers to is not taken from it: such references are counted by shard.

Results are those of a model that was made with these cuts. With one micro-batch they do not depend on the cuts, with
one exception: a parameter that is tied across layers and cast (``param_dtype``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from offload.streaming.formed_weights import seal
from offload.streaming.moves import HomeInUseError, home_in_use
from offload.streaming.shard import Shard
from offload.streaming.stored_gradients import regions_of
from pipe.process import check_process
from pipe.torch_private.autograd import outside_inference_mode

if TYPE_CHECKING:
    from offload.engine.executor import Executor

__all__ = ["recut"]


def recut(executor: Executor, cuts: Sequence[int]) -> None:
    """Cuts the layers of a model into shards of so many layers, between steps.

    Finishes pending updates; shards that rest in memory although their home is a file are written there first.

    Raises:
        ValueError: if the numbers are not those of all layers.
        RuntimeError: in a forward or backward, while a forward waits for its backward, if the model was closed, runs by
            its own forward (its blocks are its shards), or shares its slots with other models.
        HomeInUseError: if other code holds views of weights.
        OSError: if a pending update fails, or weights cannot be written. After any of these the cuts are as before.
    """
    executor.check_open()
    check_process(executor.made_in, "this OffloadModel")
    layers = sum(len(shard.layers) for shard in executor.shards)
    if min(cuts, default=0) < 1 or sum(cuts) != layers:
        raise ValueError(f"expected numbers of layers, at least 1 each and {layers} in all, got cuts={list(cuts)}")
    if list(cuts) == [len(shard.layers) for shard in executor.shards]:
        return
    if executor.busy:
        raise RuntimeError("expected no running forward or backward, but the model was to be cut otherwise within one")
    if executor.blocks:
        raise RuntimeError("expected a model whose layers are called in order: the blocks of others are their shards")
    if executor.public.sharded:
        raise RuntimeError(
            "expected a model without mesh=: what users see of its parameters belongs to its shards; make another one "
            "with the same kept home, or from a checkpoint"
        )
    if executor.resident is not None:
        raise RuntimeError("expected a model all of whose parameters stream, not one with resident=")
    if executor.streamer.slot_pool.shared:
        raise RuntimeError("expected slots of this model alone: those that models share have the size of their shards")
    if executor.waits_for_backward():
        gc.collect()  # a forward that is garbage still waits
    if executor.waits_for_backward():
        raise RuntimeError("a forward waits for its backward, which needs the shards of that forward; run or delete it")
    executor.keep_in_memory(())
    executor.streamer.apply_pending_updates()
    executor.assigned_data.store()
    executor.streamer.release()
    _check_unused(executor)
    with torch.no_grad(), outside_inference_mode():
        commit = _prepare(executor, cuts)
    try:
        commit()
    except BaseException:
        commit()  # an interrupt: everything is made, and the rest cannot fail
        raise


def _check_unused(executor: Executor) -> None:
    optimizers = executor.streamer.gradient_offload.optimizers

    def in_use() -> list[int]:
        return [shard.index for shard in executor.shards if home_in_use(shard, optimizers)]

    if in_use():
        gc.collect()  # an optimizer that is garbage still refers to homes
    if found := in_use():
        raise HomeInUseError(found)


def _prepare(executor: Executor, cuts: Sequence[int]) -> Callable[[], None]:
    """Makes everything for the new cuts; what is returned makes the executor use it, and is idempotent."""
    streamer = executor.streamer
    shards = list(executor.layer_homes.cut(cuts))
    stored = [region for region in regions_of(executor.shards) if region.stored()]
    for shard in shards:
        own = {id(s.parameter) for s in shard.own}
        shard.gradient_regions = [region for region in stored if not own.isdisjoint(region.offsets)]
    slices = {id(s.parameter): s for shard in shards for s in shard.own}
    parts = executor.parts_over(shards, before=executor.runners)
    optimizers = list(streamer.gradient_offload.optimizers)
    new_param_blocks = [optimizer.prepare_recut(shards) for optimizer in optimizers]

    @torch.no_grad()
    def commit() -> None:
        with outside_inference_mode():
            for shard in shards:
                _enter(shard)
            for region in stored:
                region.slices = [slices[id(s.parameter)] for s in region.slices]
            executor.use(parts)
            for use in new_param_blocks:
                use()
            for optimizer in optimizers:
                optimizer.reserve_buffers()
            streamer.recut()
            executor.meter.forget_shards()

    return commit


def _enter(shard: Shard) -> None:
    """Makes the parameters of a shard views of its home, at the same place in memory."""
    for s in shard.own:
        s.point_to(shard.home_view(s))
    if shard.formed:
        seal(shard)
