"""Chooses chunk sizes: as many rows as keep the graph of a chunk within the memory of GradCache steps.

Two small inputs run forward once, and the bytes that autograd saves for them are counted and extrapolated. The trial
restores generators and buffers. A number of bytes is for all that steps over plain modules hold: gradients of the
towers' parameters, and the graph of a chunk. Over an ``OffloadModel`` the model's own memory decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradcache.chunks import call_arguments
from gradcache.two_pass import device_of, devices_in_use
from offload import MemoryPolicy, OffloadModel
from offload.limits import MemoryLimits, cell_bytes, check_place, limits_of
from offload.machine import free_bytes
from offload.policy import numbers_of
from pipe.microbatch import rows_of
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.replay import Layers, Replay, trial

__all__ = ["StepMemory", "kept_by_a_shard", "kept_bytes"]

Split = Callable[[int], Sequence[Any]]
Measure = Callable[[Any], int]

#: Part of the free memory that a chunk's graph may keep where nothing is said.
_SHARE_OF_FREE = 2


class StepMemory:
    """The bytes that steps may hold. ``policy``: None is a part of the free memory."""

    def __init__(self, policy: MemoryPolicy | None = None) -> None:
        self.policy = policy
        #: The grant, with the device and bytes of gradients that it was made for.
        self._limits: tuple[tuple[torch.device, int], MemoryLimits] | None = None
        #: Chosen rows of a chunk, by model and trailing shapes of its input.
        self._chosen: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()

    def check(self, towers: Sequence[nn.Module]) -> None:
        """Raises ValueError for a policy beside towers that have their own, or a number that holds no gradients."""
        if self.policy is None or not towers:
            return
        if all(isinstance(tower, OffloadModel) for tower in towers):
            raise ValueError(
                f"the memory of a GradCache step over {type(towers[0]).__name__} is that of the model, got "
                f"memory={self.policy!r}; pass it to the model: OffloadModel(..., memory=...)"
            )
        self._granted(towers)

    def activation_bytes(self, model: nn.Module, towers: Sequence[nn.Module]) -> int:
        """Bytes that the graph of a chunk may keep."""
        own = model.memory_policy if isinstance(model, OffloadModel) else None
        for policy in (self.policy, own):
            if policy is not None and policy.activation_bytes is not None:
                return policy.activation_bytes
        if own is not None and (given := cell_bytes(own, device_of(model))) is not None:
            return given
        if self.policy is None or isinstance(model, OffloadModel):
            return free_bytes(device_of(model)) // _SHARE_OF_FREE
        limits, gradients = self._granted(towers)
        left = max(limits.device.nbytes - gradients, 1)
        # In host memory the other half is for temporaries of layers, the batch and its representations.
        return max(left // 2, 1) if limits.device is limits.host else left

    def rows_for(self, model: nn.Module, towers: Sequence[nn.Module], split: Split, measure: Measure) -> int:
        """Rows of a chunk whose graph keeps what it may; temporaries of layers need memory in addition.

        ``split(n)`` splits the input into chunks of n rows, ``measure`` returns the bytes that the graph of one keeps.
        """
        # At least two rows: a model with BatchNorm cannot train on one.
        probes = [split(2)[0], split(4)[0]]
        known = self._chosen.setdefault(model, {})
        key = repr([(t.dtype, t.shape[1:]) for t in tensors_in(probes[0])])
        if key not in known:
            rows = [rows_of(tensors_in(probe)) for probe in probes]
            sizes = [measure(probe) for probe in probes]
            per_row = sizes[1] / rows[1] if rows[0] == rows[1] else (sizes[1] - sizes[0]) / (rows[1] - rows[0])
            fixed, budget = max(sizes[1] - per_row * rows[1], 0.0), self.activation_bytes(model, towers)
            if (fitting := int((budget - fixed) // max(per_row, 1.0))) < 1:
                raise ValueError(
                    f"expected a budget for at least one row, got {budget} bytes where one row keeps "
                    f"{int(fixed + per_row)}; give it more memory, or checkpoint inside the model"
                )
            known[key] = fitting
        return known[key]

    def _granted(self, towers: Sequence[nn.Module]) -> tuple[MemoryLimits, int]:
        """What these towers' steps may hold, and bytes of their gradients."""
        assert self.policy is not None
        plain = [tower for tower in dict.fromkeys(towers) if not isinstance(tower, OffloadModel)]
        parameters = dict.fromkeys(parameter for model in plain for parameter in model.parameters())
        device, gradients = device_of(*plain), _bytes(p for p in parameters if p.requires_grad)
        made_for = device, gradients
        if self._limits is None or self._limits[0] != made_for:
            on_device, _ = numbers_of(self.policy, device)
            check_place(device, on_device, gradients + 1, " for gradients of the towers alone")
            held = _bytes(parameter.grad for parameter in parameters)
            least = gradients + 1, gradients + 1 if device.type == "cpu" else 0
            limits = limits_of(self.policy, device, least=least, held=(lambda: held, lambda: held))
            self._limits = made_for, limits
        return self._limits[1], gradients


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def kept_bytes(model: nn.Module, chunk: Any, encoder: Callable[[Any], Any]) -> int:
    """Bytes that the graph of a chunk keeps besides parameters. A frozen model is measured as if it were trained."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Storages are held, since the address of a freed one may be reused.
    kept: dict[int, torch.UntypedStorage] = {}

    def saved(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage

    def never(_: None) -> torch.Tensor:
        raise AssertionError("the graph of a forward that keeps no activations was used")

    devices = devices_in_use(tensors_in(chunk), list(model.parameters()))
    with _as_if_trained(model), trial([Layers(model, devices=devices)]), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(saved, never):
            encoder(map_tensors(lambda tensor: tensor.detach().clone(), chunk))
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


def kept_by_a_shard(
    model: OffloadModel, chunk: Any, process: Callable[[Any], Any], output_fn: Callable[[Any], Any]
) -> int:
    """The same for a model that streams its shards: bytes that the graph of one shard keeps for a chunk."""
    replay = Replay.capture(devices_in_use(tensors_in(chunk), list(model.parameters())))
    with _as_if_trained(model), replay.again():
        call = call_arguments(process(map_tensors(lambda tensor: tensor.detach().clone(), chunk)))
        return model.activation_bytes(call, output_fn=output_fn)


@contextlib.contextmanager
def _as_if_trained(model: nn.Module) -> Iterator[None]:
    frozen = [p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    try:
        for parameter in frozen:
            parameter.requires_grad_()
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
