"""What autograd saves of a shard's weights: a reference, never a copy.

A step without recomputation keeps activations from forward to backward. Layers save their weights along with them,
but by then the slot holds another shard. While a shard's forward runs, every tensor that autograd saves and that lies
in the shard's slot is replaced by a note of its place; backward finds the shard in whichever slot it is by then.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.shard import Shard

__all__ = ["weights_by_reference"]


@dataclass(frozen=True)
class _Reference:
    """Part of a shard's slot."""

    shard: Shard
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    conjugate: bool
    negative: bool

    def resolve(self) -> Tensor:
        view = self.shard.slot.view(self.dtype).as_strided(self.size, self.stride, self.storage_offset)
        if self.conjugate:
            view = view.conj()
        return torch._neg_view(view) if self.negative else view


def weights_by_reference(shard: Shard, kept: dict[int, int]) -> contextlib.AbstractContextManager[Any]:
    """Inside, autograd saves views of ``shard``'s slot by reference. The shard must be bound, then and in backward.

    ``kept`` takes note of what is saved besides: address -> bytes of each storage.
    """
    address = shard.slot.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Tensor | _Reference:
        if tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() != address:
            kept[storage.data_ptr()] = storage.nbytes()
            # Without detaching, an operation that saves its own output holds itself, through no object of Python's:
            # its activations stay for ever.
            return tensor.detach()
        return _Reference(
            shard,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def unpack(saved: Tensor | _Reference) -> Tensor:
        return saved.resolve() if isinstance(saved, _Reference) else saved

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
