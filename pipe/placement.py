"""Splits the layers of a Pipe into stages, assigns their devices, and checks both.

Invariant: errors in layers, balance or number of devices raise before any layer has been moved.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipe.balance.blockpartition import solve
from pipe.skip.layout import skip_routes
from pipe.skip.skippable import verify_skippables
from pipe.stage import Stage
from pipe.stream import normalize_device
from pipe.turn import takers_in, takes_turns

__all__ = [
    "BalanceError",
    "Device",
    "assigned_devices",
    "balance_of",
    "devices_of",
    "partitions_of",
    "stages_of",
    "updated_stages",
]

Device = torch.device | int | str


class BalanceError(ValueError):
    """A balance that does not match the module."""


def devices_of(devices: Iterable[Device] | None, balance: Sequence[int] | None) -> list[torch.device]:
    """The given devices, by default all CUDA devices, or else the CPU."""
    if devices is not None:
        return [normalize_device(device) for device in devices]
    if torch.cuda.is_available():
        return [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * (1 if balance is None else len(balance))


def balance_of(module: nn.Sequential, balance: Sequence[int] | None, devices: int) -> list[int]:
    """Number of layers of each stage: as given, or with parameters spread as evenly in bytes as possible."""
    if balance is None:
        if not len(module):
            return []
        if any(map(is_lazy, module.parameters())):
            raise BalanceError(
                "expected layers of known shapes to balance, got some that find theirs in their first forward "
                "(nn.LazyLinear and its like); pass balance=[...], or run the bare module on one row first"
            )
        costs = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in module]
        return [len(block) for block in solve(costs, max(1, min(devices, len(module))))]
    if len(module) != sum(balance):
        raise BalanceError(
            f"module and sum of balance have different length (module: {len(module)}, sum of balance: {sum(balance)}); "
            f"use pipe.balance to compute one"
        )
    if any(layers <= 0 for layers in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {balance}); use pipe.balance")
    return list(balance)


def assigned_devices(module: nn.Sequential, balance: Sequence[int], devices: list[torch.device]) -> list[torch.device]:
    """The device of each stage: a device each, or round-robin for stages that take turns."""
    if len(balance) <= len(devices):
        return devices[: len(balance)]
    if not devices or not takes_turns(module):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(balance)}); "
            f"repeat a device to put several stages on it, or offload every stage so that they take turns"
        )
    return [devices[j % len(devices)] for j in range(len(balance))]


def partitions_of(module: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """The layers of each stage."""
    layers, partitions = list(module._modules.items()), []
    for size in balance:
        partition = nn.Sequential()
        partition._modules, layers = dict(layers[:size]), layers[size:]
        partition.training = module.training
        partitions.append(partition)
    return partitions


def stages_of(partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> list[Stage]:
    """The stages, with their layers on their devices. Raises if layers on two devices share a parameter."""
    place: dict[int, tuple[torch.device, str]] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for name, tensor in [*partition.named_parameters(), *partition.named_buffers()]:
            other, other_name = place.setdefault(id(tensor), (device, name))
            if other != device:
                raise ValueError(
                    f"module with duplicate parameters on distinct devices is not supported, got {other_name!r} on "
                    f"{other} and {name!r} on {device}; put both layers on one device"
                )
    routes = skip_routes(partitions)
    for partition, device in zip(partitions, devices, strict=True):
        for layer in partition:
            if not takers_in([layer]):
                layer.to(device)
    stages = zip(partitions, devices, strict=True)
    return [Stage(layers, device, j, len(partitions), routes) for j, (layers, device) in enumerate(stages)]


def updated_stages(
    stages: Sequence[Stage], wrapped: Mapping[str, Any], layers: Mapping[str, nn.Module | None]
) -> list[Stage] | None:
    """New stages for a Pipe whose ``layers`` are no longer those that were ``wrapped``; None if they are.

    Refuses layers that were added, removed, renamed or moved, that take turns, or that were replaced in a partition.
    """
    if [item for stage in stages for item in stage.layers._modules.items()] != [*wrapped.items()]:
        raise RuntimeError(
            "expected layers to be replaced in the Pipe, got one replaced in its partitions, which parameters() does "
            "not read; use setattr(pipe, name, layer)"
        )
    if layers == wrapped and [*layers] == [*wrapped]:  # a module is equal to itself alone
        return None
    present = {name: layer for name, layer in layers.items() if layer is not None}
    if [*present] != [*wrapped]:
        raise RuntimeError(
            f"expected the layers that were wrapped, {[*wrapped]}, got {[*present]}; a layer can be replaced, but to "
            f"add, remove or move layers, make a new Pipe"
        )
    changed = [name for name in present if present[name] is not wrapped[name]]
    if takers_in(those[name] for name in changed for those in (wrapped, present)):
        raise RuntimeError("expected layers that take turns not to be replaced after wrapping; make a new Pipe")
    verify_skippables(nn.Sequential(OrderedDict(present)))
    partitions = []
    for stage in stages:
        # A shallow copy: later recomputations of an earlier forward run the layers of that forward.
        partition = copy.copy(stage.layers)
        partition._modules = {name: present[name] for name in stage.layers._modules}
        partitions.append(partition)
    return stages_of(partitions, [stage.device for stage in stages])
