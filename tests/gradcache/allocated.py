"""Counts the bytes of tensors that were made in a context and are still alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """Notes the storages of all tensors that operations return, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def alive(self, *known: Tensor) -> int:
        """Bytes of the storages that are alive, without those of ``known``."""
        theirs = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        found = {ref.cdata: nbytes for ref, nbytes in self._storages if not ref.expired()}
        return sum(nbytes for cdata, nbytes in found.items() if cdata not in theirs)
