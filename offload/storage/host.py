"""Stores shards in memory: of the host, page-locked if the compute device is an accelerator; or of that device.

Weights, gradients and states that are in the memory of the compute device are used where they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offload.storage.buffer import device_buffer, has_own_memory, host_buffer, on_own_storage, page_lock
from offload.storage.contract import Block, Scratch, Tier

__all__ = ["DeviceTier", "HostTier", "MemoryBlock"]


class MemoryBlock(Block):
    """A flat tensor in the memory of the host or of a device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read_into(self, destination: Tensor, offset: int = 0) -> None:
        """Copies to ``destination``; asynchronous on the current stream where both ends allow it."""
        source = self.tensor[offset : offset + destination.numel()]
        destination[: source.numel()].copy_(source, non_blocking=True)

    def write(self, source: Tensor, offset: int) -> None:
        """Copies from ``source``; asynchronous on the current stream where both ends allow it."""
        self.tensor[offset : offset + source.numel()].copy_(source, non_blocking=True)

    def part(self, offset: int, nbytes: int) -> Block:
        """See :meth:`Block.part`."""
        return MemoryBlock(on_own_storage(self.tensor[offset : offset + nbytes]))


class HostTier(Tier):
    """Blocks in host memory."""

    name = "host"
    blocking_io = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_device = not has_own_memory(device)

    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A zeroed block."""
        block = MemoryBlock(host_buffer(nbytes))
        self._page_lock(block, label)
        return block

    def weights(self, nbytes: int) -> Block:
        """See :meth:`Tier.weights`. Its pages take memory when they are written."""
        return MemoryBlock(host_buffer(nbytes))

    def weights_are_written(self, block: Block) -> None:
        """Page-locks it: before, all of it would take memory while the layers still have theirs."""
        self._page_lock(block, "weights")

    def _page_lock(self, block: Block, label: str) -> None:
        if self._device.type == "cuda" and block.nbytes:
            page_lock(block.tensor, label, self._device)

    def scratch(self) -> Scratch | None:
        """Page-locked memory for boundaries of a device; None on the CPU, where they are in host memory already."""
        return HostScratch() if has_own_memory(self._device) else None


class DeviceTier(Tier):
    """Blocks in the memory of the compute device, for shards that rest there."""

    name = "device"
    blocking_io = False
    on_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, nbytes: int, label: str, *, cyclic: bool = False) -> Block:
        """A zeroed block. Raises MemoryError where the device has no memory left."""
        try:
            return MemoryBlock(device_buffer(nbytes, self.device).zero_())
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{label}: no {nbytes:,} bytes are left on {self.device}") from error

    def scratch(self) -> Scratch | None:
        """None: boundaries are there already."""
        return None


class HostScratch(Scratch):
    """Boundaries of a device, in page-locked host memory."""

    name = "host"

    def store(self, tensor: Tensor) -> Callable[[Tensor], None]:
        """See :meth:`Scratch.store`."""
        stored = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        stored.copy_(tensor, non_blocking=True)

        def read_back(destination: Tensor) -> None:
            destination.copy_(stored, non_blocking=True)

        return read_back
