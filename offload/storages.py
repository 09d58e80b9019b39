"""Tensors of several types that share a storage, as ``torch.save`` takes them.

What rests in one home is views of one storage. ``torch.save`` refuses a storage that is viewed as several types, so a
``state_dict()`` shows such tensors on storages of their own: the same memory, but each from its own first byte on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from offload.storage.contract import bytes_of

__all__ = ["on_own_storages"]


def on_own_storages(values: Iterable[Any]) -> dict[int, Tensor]:
    """Another view of each tensor whose storage other tensors view as another type, by the identity of the tensor.

    Tensors at one place share a storage there, too. The views are dense, and keep the memory that they view.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and v.device.type == "cpu"]
    tensors = [t for t in tensors if t.numel()]
    types: dict[int, set[torch.dtype]] = defaultdict(set)
    for t in tensors:
        types[t.untyped_storage().data_ptr()].add(t.dtype)
    memory: dict[tuple[int, int], Tensor] = {}
    found: dict[int, Tensor] = {}
    for t in tensors:
        if len(types[t.untyped_storage().data_ptr()]) > 1:
            flat = bytes_of(t)
            # Through NumPy: no operation of torch makes a storage that begins within another one.
            flat = memory.setdefault((flat.data_ptr(), flat.numel()), torch.from_numpy(flat.numpy()))
            found[id(t)] = flat.view(t.dtype).as_strided(t.shape, t.stride())
    return found
