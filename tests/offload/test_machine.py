"""What the machine has, read from trees of files as the kernel shows them."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

import offload.machine
from offload.machine import (
    ControlGroup,
    capacity,
    control_groups,
    file_system,
    free_bytes,
    free_device_bytes,
    free_host_bytes,
)

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       40 kB\nMemFree:        1 kB\nMemAvailable:   {} kB\n"
MEMINFO += "".join(f"{name}: 0 kB\n" for name in ("Buffers", "Cached", "Shmem", "Active", "Inactive"))


class Tree:
    """A file system, of which only what a test writes is there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setattr(offload.machine, "ROOT", root)
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(root / "proc"))

    def __call__(self, files: dict[str, str], *, available: int = 30) -> None:
        for name, text in {"proc/meminfo": MEMINFO.format(available), **files}.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(os.fsencode(text))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def limit_private(monkeypatch: pytest.MonkeyPatch, limit: int, mapped: int) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(data=mapped))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, -1))
    monkeypatch.setattr(psutil, "Process", lambda: process)


def group(folder: str, limit: int | str, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\n",
    }


def test_without_a_limit_free_memory_is_what_is_available(tree: Tree) -> None:
    tree({"proc/self/cgroup": "0::/a\n"} | group("sys/fs/cgroup/a", "max", 7))
    assert control_groups() == []
    assert free_host_bytes() == 30 * 1024
    assert capacity(CPU) == 40 * 1024


@pytest.mark.parametrize("tightest", ["own", "parent", "machine", "private", "exceeded"])
def test_free_memory_is_the_least_of_all_ancestors_the_machine_and_the_limit_of_the_process(
    tree: Tree, tightest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"proc/self/cgroup": "0::/job/step\n"}
    files |= group("sys/fs/cgroup/job", 9000 if tightest == "parent" else 90_000, 8000, inactive=500, active=300)
    files |= group("sys/fs/cgroup/job/step", {"own": 5000, "exceeded": 4000}.get(tightest, 50_000), 4800, inactive=100)
    files |= group("sys/fs/cgroup/other", 10, 10)
    tree(files, available=2 if tightest == "machine" else 30)
    limit_private(monkeypatch, 9000 if tightest == "private" else resource.RLIM_INFINITY, 8600)
    expected = {"own": 300, "parent": 1500, "machine": 2048, "private": 400, "exceeded": 0}
    assert free_host_bytes() == expected[tightest]
    assert free_bytes(CPU) == free_host_bytes()
    assert capacity(CPU) == {"own": 5000, "parent": 9000, "exceeded": 4000}.get(tightest, 40 * 1024)


def test_both_versions_of_control_groups_count(tree: Tree) -> None:
    files = {
        "proc/self/cgroup": "7:cpu:/x\n4:hugetlb,memory:/job\n1:name=systemd:/y\n0::/job/step\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000",
        "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 600\n",
    }
    files |= group("sys/fs/cgroup/job", 1000, 900, 20, 300) | group("sys/fs/cgroup/job/step", "max", 900)
    tree(files)
    assert control_groups() == [ControlGroup(5000, 4000, 30, 600), ControlGroup(1000, 900, 20, 300)]
    assert free_host_bytes() == 120


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("0::/docker/1234/inner", "sys/fs/cgroup/inner"),
        ("0::/docker/1234", "sys/fs/cgroup"),
        ("0::/", "sys/fs/cgroup"),
        ("0::/docker\udcff", "sys/fs/cgroup/docker\udcff"),
    ],
)
def test_in_a_container_the_group_is_found_below_what_is_mounted(tree: Tree, line: str, folder: str) -> None:
    tree({"proc/self/cgroup": f"{line}\n"} | group(folder, 1000, 900))
    assert free_host_bytes() == 100


def test_groups_outside_of_what_is_mounted_do_not_count(tree: Tree) -> None:
    tree({"proc/self/cgroup": "0::/../other\n"} | group("sys/fs/cgroup", 1000, 900))
    assert control_groups() == []


def test_an_accelerator_can_still_give_what_is_free_and_what_its_allocator_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Accelerator:
        mem_get_info = staticmethod(lambda device: (700, 1000))
        memory_reserved = staticmethod(lambda device: 250)
        memory_allocated = staticmethod(lambda device: 50)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator)
    assert free_device_bytes(torch.device("cuda", 0)) == free_bytes(torch.device("cuda", 0)) == 900
    assert capacity(torch.device("cuda", 0)) == 1000


ODD = "/media/m\udcff\u2028\\040a\\134b\\012c"  # not UTF-8; a line separator, a space, a backslash, a line feed


def test_mounts_of_any_name_hide_no_file_system(tree: Tree) -> None:
    mounts = f"{ODD} {ODD} tmpfs rw 0 0\n/dev/a / ext4 rw 0 0\n/a /b xfs rw 0 0\n/c /b zfs rw 0 0\n"
    tree({"proc/self/mounts": mounts})
    assert file_system(Path("/home")) == "ext4"
    assert file_system(Path("/media/m\udcff\u2028 a\\b\nc/home")) == "tmpfs"
    assert file_system(Path("/b/home")) == "zfs"  # the later of two mounts hides the other
