"""The memory of GradCache steps over plain modules: what is kept between the passes, and what a chunk's graph may keep.

A number is for all that the steps hold: gradients of the towers' parameters, values that are kept between the passes,
and the graph of a chunk. Over an ``OffloadModel`` the model's own memory decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gradcache.context_managers import device_of
from gradcache.sequential import is_plain_sequential
from gradcache.streamed import StreamedModel
from offload.limits import MemoryLimits, cell_bytes, check_place, limits_of, numbers_of
from offload.machine import free_bytes
from offload.policy import MemoryPolicy

__all__ = ["StepMemory"]

#: Part of the free memory that a chunk's graph may keep where nothing is said.
_SHARE_OF_FREE = 2


class StepMemory:
    """The bytes that steps may hold.

    Args:
        policy: None runs plain modules chunk by chunk; with one, plain ``nn.Sequential`` towers run layer by layer.
    """

    def __init__(self, policy: MemoryPolicy | None = None) -> None:
        self.policy = policy
        #: The grant, with the device, bytes of gradients and number of layered towers that it was made for.
        self._limits: tuple[tuple[torch.device, int, int], MemoryLimits] | None = None

    @property
    def join_chunks(self) -> bool | None:
        """Which chunks may run together within ``boundary_bytes``, see :class:`~offload.MemoryPolicy`.

        False without this field: how many fit in what a memory leaves would change how products round.
        """
        return False if self.policy is None or self.policy.boundary_bytes is None else self.policy.join_chunks

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

    def boundary_bytes(self, towers: Sequence[nn.Module]) -> int | None:
        """Bytes that one tower that runs layer by layer keeps between the passes; None: towers run chunk by chunk."""
        if self.policy is None:
            return None
        if self.policy.boundary_bytes is not None:
            return self.policy.boundary_bytes
        limits, gradients, layered = self._granted(towers)
        if limits.device is limits.host:
            # The other half is for the graph of a chunk.
            return max(limits.host_bytes - gradients, 0) // 2 // layered
        return limits.host_bytes // layered  # kept values leave an accelerator

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
        limits, gradients, _ = self._granted(towers)
        left = max(limits.device_bytes - gradients, 1)
        return max(left // 2, 1) if limits.device is limits.host else left

    def _granted(self, towers: Sequence[nn.Module]) -> tuple[MemoryLimits, int, int]:
        """What these towers' steps may hold, bytes of their gradients, and how many of them run layer by layer."""
        assert self.policy is not None
        plain = [tower for tower in dict.fromkeys(towers) if not isinstance(tower, StreamedModel)]
        device, gradients = device_of(*plain), _gradient_bytes(plain)
        layered = max(sum(map(is_plain_sequential, plain)), 1)
        made_for = device, gradients, layered
        if self._limits is None or self._limits[0] != made_for:
            on_device, _ = numbers_of(self.policy, device)
            check_place(device, on_device, gradients + 1, " for gradients of the towers alone")
            held = _gradient_bytes_now(plain)
            least = gradients + 1, gradients + 1 if device.type == "cpu" else 0
            limits = limits_of(self.policy, device, least=least, held=(lambda: held, lambda: held))
            self._limits = made_for, limits
        return self._limits[1], gradients, layered


def _parameters(models: Iterable[nn.Module]) -> dict[nn.Parameter, None]:
    return dict.fromkeys(parameter for model in models for parameter in model.parameters())


def _gradient_bytes(models: Iterable[nn.Module]) -> int:
    """Bytes of the gradients that a step makes."""
    return sum(p.numel() * p.element_size() for p in _parameters(models) if p.requires_grad)


def _gradient_bytes_now(models: Iterable[nn.Module]) -> int:
    """Bytes of gradients that exist already."""
    grads = (parameter.grad for parameter in _parameters(models))
    return sum(grad.numel() * grad.element_size() for grad in grads if grad is not None)
