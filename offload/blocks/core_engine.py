"""Makes the engine of ``offload.core`` for an ``OffloadModel``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from offload.blocks.body import run_of
from offload.core.engine import Engine
from offload.core.mesh_engine import MeshEngine
from offload.engine.executor import Executor

__all__ = ["engine_of"]


def engine_of(executor: Executor, names: Sequence[str], *, apart: bool) -> Engine:
    """The engine that runs the layers of an executor, which then serves its plans and measurements.

    Args:
        names: the names of the layers.
        apart: whether each layer is a block that the model's forward calls; else the layers of a shard run together.
    """
    shards, structure = executor.shards, executor.structure
    assert structure is not None
    layers = [[(names[shard.first + k], layer) for k, layer in enumerate(shard.layers)] for shard in shards]
    public = executor.public
    with public.whole():
        engine = (MeshEngine if public.sharded else Engine)(
            executor.streamer,
            [[[layer] for layer in each] if apart else [each] for each in layers],
            numbers=[(shard.index, k) for shard in shards for k in range(len(shard.layers))] if apart else (),
            calls=[run_of(layer) for shard in shards for layer in shard.layers] if apart else (),
            device=executor.device,
            recompute=executor.recompute,
            assigned=executor.assigned_data,
            structure=structure,
            owner=executor,
        )
    executor.native = weakref.ref(engine)
    for runner in executor.runners:
        runner.native = True
    executor.recount()
    public.recount()
    return engine
