"""Makes the engine of ``offload.engine`` for an ``OffloadModel``."""

from __future__ import annotations

from collections.abc import Sequence

from offload.blocks.body import run_of
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.engine.mesh_engine import MeshEngine

__all__ = ["engine_of"]


def engine_of(homes: ModelHomes, names: Sequence[str], *, apart: bool) -> Engine:
    """The engine that runs the layers of a model with these homes.

    Args:
        names: the names of the layers.
        apart: whether each layer is a block that the model's forward calls; else the layers of a shard run together.
    """
    shards, structure = homes.shards, homes.structure
    assert structure is not None
    layers = [[(names[shard.first + k], layer) for k, layer in enumerate(shard.layers)] for shard in shards]
    public = homes.public
    with public.whole():
        engine = (MeshEngine if public.sharded else Engine)(
            homes.streamer,
            [[[layer] for layer in each] if apart else [each] for each in layers],
            numbers=[(shard.index, k) for shard in shards for k in range(len(shard.layers))] if apart else (),
            calls=[run_of(layer) for shard in shards for layer in shard.layers] if apart else (),
            device=homes.device,
            recompute=homes.recompute,
            assigned=homes.assigned_data,
            structure=structure,
            owner=homes,
        )
    homes.run_by(engine)
    public.recount()
    return engine
