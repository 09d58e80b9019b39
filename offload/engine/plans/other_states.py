"""Finds the states that optimizers of torch hold for parameters of a model."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from offload.streaming.shard import Shard

__all__ = ["states_of_others"]


def states_of_others(shards: Collection[Shard]) -> Iterator[tuple[str, int]]:
    """The class and the bytes of the states of each optimizer that was not made for a model in shards.

    torch keeps no list of its optimizers, and a hook would run in every step of each.
    """
    ours = {id(there.parameter) for shard in shards for there in shard.at_home}
    for found in gc.get_objects():
        if issubclass(type(found), torch.optim.Optimizer):  # a proxy whose object has ended has no ``__class__``
            states = [state for p, state in found.state.items() if id(p) in ours]
            tensors = [x for state in states for x in state.values() if isinstance(x, Tensor)]
            nbytes = sum(x.untyped_storage().nbytes() for x in tensors)
            if nbytes:
                yield type(found).__name__, nbytes
