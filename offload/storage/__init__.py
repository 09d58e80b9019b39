"""Storage of shards, gradients, optimizer states and boundaries: one interface, in host memory or in files."""

from __future__ import annotations

import os
import warnings
from typing import TypeGuard

import torch

from offload.storage.contract import Block, Scratch, Tier
from offload.storage.disk import DiskTier
from offload.storage.home import DiskHome, absolute
from offload.storage.host import DeviceTier, HostTier
from offload.storage.persistent import HomeError, PersistentTier

__all__ = [
    "Block",
    "DeviceTier",
    "DiskHome",
    "DiskTier",
    "HomeError",
    "HostTier",
    "PersistentTier",
    "Scratch",
    "Tier",
    "absolute_home",
    "is_directory",
    "open_tier",
]


def is_directory(offload_device: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether ``offload_device`` names a directory, so that homes are files."""
    return isinstance(offload_device, os.PathLike) or (isinstance(offload_device, str) and os.sep in offload_device)


def absolute_home(
    offload_device: str | torch.device | os.PathLike[str],
) -> str | torch.device | os.PathLike[str]:
    """``offload_device``, with the path of a directory from the root of the file system."""
    if isinstance(offload_device, DiskHome) or not is_directory(offload_device):
        return offload_device
    return absolute(offload_device)


def open_tier(
    offload_device: str | torch.device | os.PathLike[str], device: torch.device, *, keeps: bool = False
) -> Tier:
    """Opens the storage that ``offload_device`` names: host memory (``"cpu"``) or a directory.

    A directory is an ``os.PathLike``, such as a :class:`DiskHome`, or a string with a path separator. ``keeps``: the
    caller supports homes that outlive it. Raises TypeError or ValueError for anything else, or a persistent home that
    is in use or that the caller does not support; OSError if the directory cannot be written to.
    """
    if isinstance(offload_device, DiskHome):
        if not offload_device.keep:
            return DiskTier(offload_device, device, direct=offload_device.direct)
        if not keeps:
            raise ValueError("DiskHome(keep=True) is supported by OffloadModel only; pass a directory")
        return PersistentTier(offload_device, device)
    if is_directory(offload_device):
        return DiskTier(offload_device, device)
    if not isinstance(offload_device, (str, torch.device)):
        raise TypeError(
            f"expected 'cpu' or a directory as offload_device, got {type(offload_device).__name__} "
            f"(offload_device={offload_device!r})"
        )
    try:
        kind = torch.device(offload_device).type
    except RuntimeError:
        kind = None
    if kind != "cpu":
        raise ValueError(
            f"expected 'cpu' or a directory as offload_device, got {str(offload_device)!r}; write a directory "
            f"as a path with a separator, such as './{offload_device}'"
        )
    if device.type == "cpu":
        warnings.warn(
            "offload_device 'cpu' is memory of the compute device, so storing shards there saves none; pass a "
            "directory on a disk, such as './home'",
            RuntimeWarning,
            stacklevel=5,
        )
    return HostTier(device)
