"""Reads how much memory this process can still get: limits, control groups, the machine; on CUDA, the allocator."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

__all__ = [
    "ControlGroup",
    "capacity",
    "control_groups",
    "file_system",
    "free_bytes",
    "free_device_bytes",
    "free_host_bytes",
]

#: Below this are ``/proc`` and the mounted control groups.
ROOT = Path("/")


@dataclass(frozen=True)
class ControlGroup:
    """The memory of one control group, in bytes; the page cache of files is a part of ``usage``."""

    limit: int
    usage: int
    inactive_file: int
    active_file: int


#: Of both versions of control groups: where systems mount them, the files of limit and usage, a prefix of statistics.
_VERSIONS = {
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", ""),
}


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still get in the memory of a device."""
    return free_host_bytes() if device.type == "cpu" else free_device_bytes(device)


def free_host_bytes() -> int:
    """The least of what the machine has without swapping, and what the limit of this process on private memory
    (``RLIMIT_DATA``) and each control group above it leave.

    A group leaves ``memory.max - (memory.current - inactive_file)``: its inactive file pages are dropped first. Private
    memory counts as it is mapped, used or not: heaps, buffers, and the stack of each thread (often 8 MiB).
    """
    left = [int(psutil.virtual_memory().available)]
    left += [group.limit - (group.usage - group.inactive_file) for group in control_groups()]
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:
        left.append(limit - int(psutil.Process().memory_info().data))
    return max(0, min(left))


def free_device_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator can still get on an accelerator: free ones, and those that it keeps for reuse."""
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))


def capacity(device: torch.device) -> int:
    """All bytes of a device's memory; on the host no more than any control group above this process may use."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return min([int(psutil.virtual_memory().total), *(group.limit for group in control_groups())])


def control_groups() -> list[ControlGroup]:
    """The control groups of this process and their ancestors, of both versions, that limit its memory."""
    found = []
    for version, parts in _groups_of_this_process():
        mounted, limit, usage, prefix = _VERSIONS[version]
        mount = ROOT / mounted
        # In a container only the container's group may be mounted.
        suffixes = (mount.joinpath(*parts[k:]) for k in range(len(parts)))
        group = next((suffix for suffix in suffixes if suffix.is_dir()), mount)
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(mount):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit is "max", or no such file
                counts = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat"))
                lists = [int(counts.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active")]
                found.append(ControlGroup(_number(folder / limit), _number(folder / usage), *lists))
    return found


def _groups_of_this_process() -> Iterator[tuple[int, Sequence[str]]]:
    """The version, and the path of the group, for each hierarchy that may control memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in _lines(ROOT / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            _, *parts = Path(path).parts
            # Outside of the namespace of control groups, no mount shows its ancestors.
            if ".." not in parts and (not controllers or "memory" in controllers.split(",")):
                yield (1 if controllers else 2), parts


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path``, or "" if the system does not say."""
    resolved = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place the later one hides the other.
    return max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""


def _number(path: Path) -> int:
    return int(path.read_text())


def _lines(path: Path) -> list[str]:
    """The lines of a file of the system, where names may be any bytes: only a line feed ends them."""
    return [line for line in os.fsdecode(path.read_bytes()).split("\n") if line]
