"""Counts what a model holds on the compute device outside of its shards: parameters, their gradients, their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from offload.engine.homes import ModelHomes
from offload.planning.step_model import OutsideBytes
from offload.streaming.shard import Shard
from pipe.nested import parts_of

__all__ = ["bytes_staying", "outside_bytes"]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _values(
    modules: Iterable[nn.Module],
    around: Collection[nn.Parameter],
    adapters: Iterable[nn.Parameter],
    dtype: torch.dtype | None,
) -> int:
    """Bytes of parameters, of their casts to the type of a forward, and of the buffers of ``modules``."""
    buffers = {x: None for module in modules for x in module._buffers.values() if x is not None}
    cast = [p for p in around if dtype is not None and p.is_floating_point() and p.dtype != dtype]
    casts = 0 if dtype is None else sum(p.numel() * dtype.itemsize for p in cast)
    return _nbytes(part for x in (*around, *adapters, *buffers) for part in parts_of(x)) + casts


def bytes_staying(
    modules: Collection[nn.Module], adapters: Collection[nn.Parameter], dtype: torch.dtype | None, *, states: int = 0
) -> int:
    """Least bytes that stay on the compute device in a step that trains: parameters, buffers and gradients.

    Args:
        modules: those around blocks.
        adapters: parameters of layers that stay.
        dtype: in which layers compute, if not in that of the parameters.
        states: states of an optimizer to count, each as large as its parameter.
    """
    own = dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None)
    gradients = _nbytes(p for p in (*own, *adapters) if p.requires_grad)
    return _values(modules, list(own), adapters, dtype) + (1 + states) * gradients


def outside_bytes(homes: ModelHomes) -> OutsideBytes:
    """The bytes outside of the shards of a model.

    A gradient that the last backward has not made counts from the begin of the backward on.
    """
    parameters, adapters, shards = homes.outside, homes.resident, homes.shards
    first, copied, within = Counter[int](), Counter[int](), Counter[int]()
    for p in parameters:
        if p.requires_grad:
            nbytes, pieces = homes.leaf_gradients.get(id(p), (_nbytes([p]), None))
            before = {len(shards)} if pieces is None else {_shard_of(piece, shards) for piece in pieces}
            first[max(before)] += nbytes
            for j in before - {max(before)}:  # made there, and added to the first one
                copied[j] += nbytes
    own = [] if adapters is None else [s.parameter for s in adapters.own]
    seen: set[nn.Parameter] = set()
    for shard in sorted(shards, key=lambda shard: -shard.index):
        used = {there.parameter for owner, there in shard.borrowed if owner is adapters} - seen
        within[shard.index] = _nbytes(p for p in used if p.requires_grad)
        seen |= used
    held = [p.grad for p in (*parameters, *own) if p.grad is not None]
    return OutsideBytes(
        values=_values(homes.around.values(), parameters, own, homes.param_dtype),
        states=homes.streamer.gradient_offload.optimizers.resident_state_bytes(),
        made_before=first,
        copied_before=copied,
        made_in=within,
        held=_nbytes(held),
    )


def _shard_of(piece: int, shards: Collection[Shard]) -> int:
    """The shard of the block that follows a piece of code around blocks; their number after the last block."""
    return sum(shard.first + len(shard.layers) <= piece for shard in shards)
