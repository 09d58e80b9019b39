"""Counts what is on the twin of a device: the CPU, as if it had memory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload import OffloadModel, OffloadOptimizer
from pipe.nested import tensors_in


class DeviceCount(TorchDispatchMode):
    """The most bytes of all storages that layers and autograd use in this context, slots and resting shards included.

    Each storage counts once, from the first operation that takes or makes it until it is freed. Not those of ``user``:
    tensors that the caller holds, such as a batch.
    """

    def __init__(self, model: OffloadModel, optimizer: OffloadOptimizer, user: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._homes, self._optimizer = model._homes, optimizer
        self._users = {x.untyped_storage().data_ptr() for x in user}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(tensors_in((list(args), kwargs or {}, result)))
        return result

    def _note(self, tensors: Sequence[Tensor]) -> None:
        apart = self._apart()
        for x in tensors:
            if x.layout is not torch.strided or x.is_meta or x.dtype == torch.uint8:  # states of generators
                continue
            storage = x.untyped_storage()
            at = storage.data_ptr()
            if storage.nbytes() and not any(begin <= at < end for begin, end in apart) and at not in self._users:
                self._live[at] = StorageWeakRef(storage), storage.nbytes()
        self._live = {at: each for at, each in self._live.items() if not each[0].expired()}
        now = self._there() + sum(nbytes for _, nbytes in self._live.values())
        self.peak = max(self.peak, now)

    def _slots(self) -> list[Tensor]:
        pool = self._homes.streamer.slot_pool
        return [*pool._all, *pool._own.values()]

    def _apart(self) -> list[tuple[int, int]]:
        """Memory that is counted otherwise, or is at home."""
        blocks = [b.tensor for s in self._homes.shards for b in (s.home, s.file) if b is not None]
        blocks += [region.block.tensor for s in self._homes.shards for region in s.gradient_regions]
        return [(x.data_ptr(), x.data_ptr() + x.numel()) for x in (*blocks, *self._slots()) if x.numel()]

    def _there(self) -> int:
        resting = [s for s in self._homes.shards if s.tier is not None and s.tier.on_device and s.home is not None]
        slots = {x.data_ptr(): x.numel() for x in self._slots()}
        return (
            sum(s.home.nbytes for s in resting if s.home is not None)
            + sum(slots.values())
            + sum(map(self._optimizer.state_bytes, resting))
        )


def counted_and_predicted(
    model: OffloadModel,
    optimizer: OffloadOptimizer,
    x: Tensor,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[int, int]:
    """The most bytes of steps once the first two have measured, and what is predicted; closes the model."""
    most = 0
    for k in range(6):
        optimizer.zero_grad()
        with DeviceCount(model, optimizer, [x]) as count:
            with autocast():
                model(x).sum().backward()  # a loss without tensors of its own
        optimizer.step()
        optimizer.synchronize()
        most = max(most, count.peak) if k > 1 else most
    predicted = model.memory_report().predicted
    model.close()
    assert predicted is not None
    return most, predicted.memory_bytes
