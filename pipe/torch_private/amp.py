"""Private names of ``torch.amp``: the copies that a ``GradScaler`` makes of its scale."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator

__all__ = ["complete_copies_of_grad_scalers"]


def complete_copies_of_grad_scalers() -> None:
    """From now on each ``GradScaler`` waits for a copy of its scale to host memory. Idempotent.

    The scale is where the loss is, and the scaler copies it to where gradients are, without waiting: between devices
    streams keep the order. But operations in host memory follow no stream: gradients there would be multiplied by what
    the memory held before.
    """
    get = _MultiDeviceReplicator.get
    if hasattr(get, "__wrapped__"):
        return

    @functools.wraps(get)
    def get_complete(self: _MultiDeviceReplicator, device: torch.device) -> Tensor:
        is_new = device not in self._per_device_tensors
        copy = get(self, device)
        if is_new and copy.device.type == "cpu" and self.master.device.type == "cuda":
            # Stream -> host. Without this, gradients in host memory are multiplied by a scale that is not there yet.
            torch.cuda.current_stream(self.master.device).synchronize()
        return copy

    _MultiDeviceReplicator.get = get_complete  # type: ignore[method-assign]
