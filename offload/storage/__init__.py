"""Storage of shards, gradients, optimizer states and boundaries: one interface, in host memory or in files."""

from __future__ import annotations

import os
import warnings

import torch

from offload.storage.contract import Block, Scratch, Tier
from offload.storage.disk import DiskTier
from offload.storage.home import DiskHome, home_of
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
    "home_of",
    "open_tier",
]


def open_tier(
    offload_device: str | torch.device | os.PathLike[str], device: torch.device, *, keeps: bool = False
) -> Tier:
    """Opens the storage that ``offload_device`` names: host memory (``"cpu"``) or a directory.

    A directory is an ``os.PathLike``, such as a :class:`DiskHome`, or a string with a path separator. ``keeps``: the
    caller supports homes that outlive it. Raises TypeError or ValueError for anything else, or a persistent home that
    is in use or that the caller does not support; OSError if the directory cannot be written to.
    """
    home = home_of(offload_device)
    if home is not None and not home.keep:
        return DiskTier(home, device, direct=home.direct)
    if home is not None:
        if not keeps:
            raise ValueError("DiskHome(keep=True) is supported by OffloadModel without mesh= only; pass a directory")
        return PersistentTier(home, device)
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
            stacklevel=5,  # where offload() was called
        )
    return HostTier(device)
