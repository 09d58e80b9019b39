"""Views of stored tensors that ``torch.save`` accepts, for ``state_dict()``.

Tensors of one home are views of one storage, and ``torch.save`` refuses a storage that is viewed as several dtypes. So
such tensors get storages of their own, each of which begins at the tensor's first byte in the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from offload.storage.buffer import on_own_storage
from offload.storage.contract import bytes_of
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass

__all__ = ["on_own_storages"]


def on_own_storages(values: Iterable[Any]) -> dict[int, Tensor]:
    """Another view of each tensor whose storage other tensors view as another dtype, by ``id(tensor)``.

    Tensors with the same bytes still share a storage. The views are dense, and keep their memory alive.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and v.device.type == "cpu"]
    tensors = [t for t in tensors if t.numel() and not is_traceable_wrapper_subclass(t)]
    types: dict[int, set[torch.dtype]] = defaultdict(set)
    for t in tensors:
        types[t.untyped_storage().data_ptr()].add(t.dtype)
    memory: dict[tuple[int, int], Tensor] = {}
    found: dict[int, Tensor] = {}
    for t in tensors:
        if len(types[t.untyped_storage().data_ptr()]) > 1:
            flat = bytes_of(t)
            flat = memory.setdefault((flat.data_ptr(), flat.numel()), on_own_storage(flat))
            found[id(t)] = flat.view(t.dtype).as_strided(t.shape, t.stride())
    return found
