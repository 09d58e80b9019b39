"""Placement: how many layers each stage has, on which device it is, and whether that can be.

Invariant: whatever is wrong with layers, balance or number of devices raises before any layer has been moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipe.balance.blockpartition import solve
from pipe.batchnorm import DeferredBatchNorm
from pipe.skip.layout import inspect_skip_layout
from pipe.stage import Stage
from pipe.stream import normalize_device
from pipe.turn import takers_in, takes_turns

__all__ = ["BalanceError", "Device", "balance_of", "check_convertible", "dealt", "devices_of", "stages_of"]

Device = torch.device | int | str


class BalanceError(ValueError):
    """A balance that does not fit the module."""


def check_convertible(module: nn.Module) -> None:
    """A module that is loaded for its turn has taken its layers in already; replacing them would be in vain.

    Raises:
        ValueError: naming the layer.
    """
    for name, taker in module.named_modules():
        if not takers_in([taker]) or takers_in(taker.children()):
            continue
        for inner, layer in taker.named_modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, DeferredBatchNorm) and layer.track_running_stats:
                raise ValueError(
                    f"expected layers to convert before they are offloaded, got {name}.{inner} inside "
                    f"{type(taker).__name__} (deferred_batch_norm=True); offload the result of "
                    f"DeferredBatchNorm.convert_deferred_batch_norm(layers)"
                )


def devices_of(devices: Iterable[Device] | None, balance: Sequence[int] | None) -> list[torch.device]:
    """The devices that were given, or those that there are."""
    if devices is not None:
        return [normalize_device(device) for device in devices]
    if torch.cuda.is_available():
        return [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * (1 if balance is None else len(balance))


def balance_of(module: nn.Sequential, balance: Sequence[int] | None, devices: int) -> list[int]:
    """Layers of each stage: as given, or as even in bytes of parameters as can be.

    Raises:
        BalanceError: if they do not fit the module.
    """
    if balance is None:
        if not len(module):
            return []
        costs = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in module]
        return [len(block) for block in solve(costs, max(1, min(devices, len(module))))]
    given = list(balance)
    if len(module) != sum(given):
        raise BalanceError(
            f"module and sum of balance have different length (module: {len(module)}, sum of balance: {sum(given)}); "
            f"use pipe.balance to find one"
        )
    if any(layers <= 0 for layers in given):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {given}); use pipe.balance")
    return given


def dealt(
    module: nn.Sequential, balance: Sequence[int], devices: list[torch.device], *, automatic_devices: bool
) -> list[torch.device]:
    """The device of each stage: one each, or in rounds for stages that take turns.

    Raises:
        IndexError: if there are too few.
    """
    if len(balance) <= len(devices):
        return devices[: len(balance)]
    if not devices or not takes_turns(module):
        source = "found" if automatic_devices else "given"
        raise IndexError(
            f"too few devices to hold given partitions (devices {source}: {len(devices)}, partitions: {len(balance)}); "
            f"repeat a device to put several stages on it, or offload every stage so that they take turns"
        )
    return [devices[j % len(devices)] for j in range(len(balance))]


def stages_of(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> list[Stage]:
    """The stages, with their layers on their devices.

    Raises:
        ValueError: if layers on two devices share a parameter.
    """
    layers = list(module._modules.items())
    partitions: list[nn.Sequential] = []
    place: dict[int, tuple[torch.device, str]] = {}
    begin = 0
    for size, device in zip(balance, devices, strict=True):
        partition = nn.Sequential()
        partition._modules = dict(layers[begin : begin + size])
        partition.training = module.training
        for name, tensor in [*partition.named_parameters(), *partition.named_buffers()]:
            other, other_name = place.setdefault(id(tensor), (device, name))
            if other != device:
                raise ValueError(
                    f"module with duplicate parameters on distinct devices is not supported, got {other_name!r} on "
                    f"{other} and {name!r} on {device}; put both layers on one device"
                )
        partitions.append(partition)
        begin += size
    for partition, device in zip(partitions, devices, strict=True):
        for layer in partition:
            if not takers_in([layer]):
                layer.to(device)
    layout = inspect_skip_layout(partitions)
    return [Stage(p, d, j, layout) for j, (p, d) in enumerate(zip(partitions, devices, strict=True))]
