"""In which form a model stores weights, gradients and optimizer states, for a report of what fewer bytes would save."""

from __future__ import annotations

import torch

from offload.engine.homes import ModelHomes
from offload.mesh.shard import MeshShard
from offload.planning.byte_forms import ByteForm
from offload.planning.explain import Stored

__all__ = ["stored_form"]


def stored_form(homes: ModelHomes) -> Stored | None:
    """How float32 parameters and what belongs to them are stored in files.

    None where no form of fewer bytes is known to work: with a mesh, homes in memory, other types, or without exactly
    one optimizer that has made its states.
    """
    shards, optimizers, tier = homes.shards, homes.streamer.gradient_offload.optimizers, homes.tier
    known, trained = list(optimizers), [s for shard in shards for s in shard.own if s.parameter.requires_grad]
    if not tier.blocking_io or any(isinstance(shard, MeshShard) for shard in shards):
        return None
    if len(known) != 1 or optimizers.awaits_states() or not trained:
        return None
    if any(s.full_dtype is not torch.float32 for shard in shards for s in shard.own):
        return None
    (optimizer,) = known
    weights = next((s.form.store_dtype for s in trained if s.form is not None), None)
    gradients = shards[0].gradient_types.dtype
    form = ByteForm(
        weights={None: "full", "split": "split", torch.bfloat16: "bfloat16"}[weights],
        gradients="full" if gradients is None else "bfloat16",
        states="full" if optimizer.factory.form is None else optimizer.factory.form.name,
    )
    stored = sum(optimizer.state_bytes(shard) for shard in shards)
    states = stored / form.state_share / sum(s.full_nbytes for s in trained)
    return Stored(form, states, takes_weights=not tier.keeps)
