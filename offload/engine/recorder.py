"""Records which tensors autograd saves in a cell, and when its backward frees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.saved_weights import origin_of_cast
from offload.planning.memory_profile import SavedTensor
from offload.streaming.shard import Shard

__all__ = ["Recorder"]


class Recorder:
    """Records what autograd saves in one cell of a shard, whose weights are in ``memory``."""

    def __init__(self, shard: Shard, memory: Tensor | None) -> None:
        begin = 0 if memory is None else memory.data_ptr()
        self._range = range(begin, begin + (0 if memory is None else memory.numel() * memory.element_size()))
        trained = [s for s in shard.slices if s.parameter.requires_grad]
        self._weights = {begin + s.offset: s.nbytes for s in trained}
        if memory is None:
            self._weights = {s.parameter.data_ptr(): s.nbytes for s in trained}
        self._saved: list[tuple[int | StorageWeakRef, int]] = []
        self.nbytes: dict[StorageWeakRef, int] = {}
        #: Bytes of casts of weights, which autocast keeps where these are leaves of autograd.
        self.cast_bytes = 0
        self._casts: set[StorageWeakRef] = set()

    def add(self, tensor: Tensor) -> None:
        """Called for each tensor that autograd saves."""
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return
        try:
            address, storage = tensor.data_ptr(), tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        if address in self._range or address in self._weights:
            self._saved.append((address, 0))
            return
        key = StorageWeakRef(storage)
        if self._is_cast(tensor):
            self.cast_bytes += 0 if key in self._casts else storage.nbytes()
            self._casts.add(key)
            return
        self.nbytes[key] = storage.nbytes()
        flows = tensor.numel() * tensor.element_size() if tensor.is_floating_point() or tensor.is_complex() else 0
        self._saved.append((key, flows))

    def _is_cast(self, tensor: Tensor) -> bool:
        """Whether a tensor is a trained weight in another type: it does not grow with rows."""
        node, _ = origin_of_cast(tensor)
        weight = getattr(node, "variable", None)
        return hasattr(node, "visit") or (weight is not None and weight.data_ptr() in self._weights)

    def saved_tensors(self, elsewhere: Sequence[Tensor]) -> list[SavedTensor]:
        """The saved tensors in the order of backward; those ``elsewhere`` are not freed by it."""
        plain = (x for x in elsewhere if type(x) is Tensor and x.layout is torch.strided)
        staying = {StorageWeakRef(x.untyped_storage()) for x in plain}
        first = {key: k for k, (key, _) in reversed([*enumerate(self._saved)])}
        come: set[Any] = set()
        found = []
        for k in range(len(self._saved) - 1, -1, -1):
            key, flows = self._saved[k]
            if isinstance(key, int):
                found.append(SavedTensor(0 if key in come else self._weights.get(key, 0), 0, 0))
                come.add(key)
            else:
                freed = self.nbytes.get(key, 0) if first[key] == k and key not in staying else 0
                found.append(SavedTensor(0, flows, freed))
        return found
