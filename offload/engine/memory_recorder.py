"""Records what autograd saves while a shard runs forward, for the :class:`MemoryProfile` of its backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.planning.memory_profile import SavedTensor
from offload.streaming.shard import Shard
from pipe.nested import parts_of

__all__ = ["MemoryProfileRecorder"]


class MemoryProfileRecorder:
    """Records the tensors that autograd saves while the layers of a bound shard run.

    Args:
        shard: whose weights, in its slot, do not count as activations.
    """

    def __init__(self, shard: Shard) -> None:
        slot = shard.slot.data_ptr()
        self._slot = StorageWeakRef(shard.slot.untyped_storage())
        self._weights = {slot + s.offset: s.nbytes for s in shard.slices if s.parameter.requires_grad}
        #: Address of a weight, or storage of an activation; bytes of its gradient.
        self._saved: list[tuple[int | StorageWeakRef, int]] = []
        self._nbytes: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Called for each tensor that autograd saves."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage == self._slot:
            self._saved.append((tensor.data_ptr(), 0))
            return
        self._nbytes[storage] = tensor.untyped_storage().nbytes()
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        self._saved.append((storage, tensor.numel() * tensor.element_size() if differentiable else 0))

    def saved_tensors(self, elsewhere: Iterable[Tensor] = ()) -> list[SavedTensor]:
        """The saved tensors, in the order of backward. Tensors in ``elsewhere`` are not freed by autograd."""
        staying = {StorageWeakRef(part.untyped_storage()) for tensor in elsewhere for part in parts_of(tensor)}
        first = {key: k for k, (key, _) in reversed([*enumerate(self._saved)])}
        come: set[int | StorageWeakRef] = set()
        saved_tensors = []
        for k in range(len(self._saved) - 1, -1, -1):
            key, flows = self._saved[k]
            if isinstance(key, int):
                stays = 0 if key in come else self._weights.get(key, 0)
                come.add(key)
                saved_tensors.append(SavedTensor(stays, 0, 0))
            else:
                freed = self._nbytes[key] if first[key] == k and key not in staying else 0
                saved_tensors.append(SavedTensor(0, flows, freed))
        return saved_tensors
