"""The memory of GradCache steps over plain modules: what the graph of a chunk may keep.

A number is for all that the steps hold: gradients of the towers' parameters, and the graph of a chunk. Over an
``OffloadModel`` the model's own memory decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gradcache.context_managers import device_of
from gradcache.streamed import StreamedModel
from offload.limits import MemoryLimits, cell_bytes, check_place, limits_of, numbers_of
from offload.machine import free_bytes
from offload.policy import MemoryPolicy

__all__ = ["StepMemory"]

#: Part of the free memory that a chunk's graph may keep where nothing is said.
_SHARE_OF_FREE = 2


class StepMemory:
    """The bytes that steps may hold. ``policy``: None is a part of the free memory."""

    def __init__(self, policy: MemoryPolicy | None = None) -> None:
        self.policy = policy
        #: The grant, with the device and bytes of gradients that it was made for.
        self._limits: tuple[tuple[torch.device, int], MemoryLimits] | None = None

    def check(self, towers: Sequence[nn.Module]) -> None:
        """Raises ValueError for a policy beside towers that have their own, or a number that holds no gradients."""
        if self.policy is None or not towers:
            return
        if all(isinstance(tower, StreamedModel) for tower in towers):
            raise ValueError(
                f"the memory of a GradCache step over {type(towers[0]).__name__} is that of the model, got "
                f"memory={self.policy!r}; pass it to the model: OffloadModel(..., memory=...)"
            )
        self._granted(towers)

    def activation_bytes(self, model: nn.Module, towers: Sequence[nn.Module]) -> int:
        """Bytes that the graph of a chunk may keep."""
        own = getattr(model, "memory_policy", None)
        for policy in (self.policy, own):
            if isinstance(policy, MemoryPolicy) and policy.activation_bytes is not None:
                return policy.activation_bytes
        if isinstance(own, MemoryPolicy) and (given := cell_bytes(own, device_of(model))) is not None:
            return given
        if self.policy is None or isinstance(model, StreamedModel):
            return free_bytes(device_of(model)) // _SHARE_OF_FREE
        limits, gradients = self._granted(towers)
        left = max(limits.device_bytes - gradients, 1)
        # In host memory the other half is for temporaries of layers, the batch and its representations.
        return max(left // 2, 1) if limits.device is limits.host else left

    def _granted(self, towers: Sequence[nn.Module]) -> tuple[MemoryLimits, int]:
        """What these towers' steps may hold, and bytes of their gradients."""
        assert self.policy is not None
        plain = [tower for tower in dict.fromkeys(towers) if not isinstance(tower, StreamedModel)]
        device, gradients = device_of(*plain), _gradient_bytes(plain)
        made_for = device, gradients
        if self._limits is None or self._limits[0] != made_for:
            on_device, _ = numbers_of(self.policy, device)
            check_place(device, on_device, gradients + 1, " for gradients of the towers alone")
            held = _gradient_bytes_now(plain)
            least = gradients + 1, gradients + 1 if device.type == "cpu" else 0
            limits = limits_of(self.policy, device, least=least, held=(lambda: held, lambda: held))
            self._limits = made_for, limits
        return self._limits[1], gradients


def _parameters(models: Iterable[nn.Module]) -> dict[nn.Parameter, None]:
    return dict.fromkeys(parameter for model in models for parameter in model.parameters())


def _gradient_bytes(models: Iterable[nn.Module]) -> int:
    """Bytes of the gradients that a step makes."""
    return sum(p.numel() * p.element_size() for p in _parameters(models) if p.requires_grad)


def _gradient_bytes_now(models: Iterable[nn.Module]) -> int:
    """Bytes of gradients that exist already."""
    grads = (parameter.grad for parameter in _parameters(models))
    return sum(grad.numel() * grad.element_size() for grad in grads if grad is not None)
