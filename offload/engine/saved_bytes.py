"""How many bytes a graph keeps: each storage once, and no parameter's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["SavedBytes"]


class SavedBytes:
    """A context that counts what a graph keeps, each storage once. The graph is not for a backward."""

    def __init__(self, parameters: Sequence[Tensor], on_saved: Callable[[Tensor], None] = lambda tensor: None) -> None:
        self._on_saved = on_saved
        self._parameters = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        # Storages are held, since the address of one that is freed would soon be another one's. So nothing may keep
        # this object longer than its user: hooks that were a part of it would, until the garbage is collected.
        self._counted: dict[int, torch.UntypedStorage] = {}
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.saved, self._never)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        hooks.__exit__(*error)

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(storage.nbytes() for storage in self._counted.values())

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, unless it was counted before or is a parameter's."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._counted[storage.data_ptr()] = storage

    def forget(self, tensor: Tensor) -> None:
        """Takes a tensor's storage out of the count again."""
        self._counted.pop(tensor.untyped_storage().data_ptr(), None)

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves a tensor."""
        self._on_saved(tensor)
        self.count(tensor)

    @staticmethod
    def _never(_: None) -> Tensor:
        raise AssertionError("the graph of a forward that keeps no activations was used")
