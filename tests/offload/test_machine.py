"""What the machine has, read from trees of files as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from offload.machine import (
    ControlGroup,
    capacity,
    control_groups,
    file_system,
    free_bytes,
    free_device_bytes,
    free_host_bytes,
    private_bytes_left,
)

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       40 kB\nMemFree:        1 kB\nMemAvailable:   {} kB\n"
V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str], *, available: int = 30) -> Path:
    for name, text in {"proc/meminfo": MEMINFO.format(available), **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: int | str, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\n",
    }


@pytest.mark.parametrize("tightest", ["own", "parent", "machine"])
def test_free_memory_is_the_least_of_all_ancestors_and_the_machine(tmp_path: Path, tightest: str) -> None:
    files = {"proc/self/cgroup": "0::/job/step\n", "proc/self/mountinfo": V2}
    files |= group("sys/fs/cgroup/job", 9000 if tightest == "parent" else 90_000, 8000, inactive=500, active=300)
    files |= group("sys/fs/cgroup/job/step", 5000 if tightest == "own" else 50_000, 4800, inactive=100)
    files |= group("sys/fs/cgroup/other", 10, 10)
    tree(tmp_path, files, available=2 if tightest == "machine" else 30)
    assert free_host_bytes(tmp_path) == {"own": 300, "parent": 1500, "machine": 2048}[tightest]
    assert free_bytes(CPU, tmp_path) == free_host_bytes(tmp_path)
    assert capacity(CPU, tmp_path) == {"own": 5000, "parent": 9000, "machine": 40 * 1024}[tightest]


def test_both_versions_of_control_groups_count(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "7:cpu:/x\n4:hugetlb,memory:/job\n1:name=systemd:/y\n0::/job/step\n",
        "proc/self/mountinfo": (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
            "42 31 0:39 / / rw - ext4 /dev/vda rw,errors=memory\n"
        ),
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000",
        "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 600\n",
    }
    files |= group("sys/fs/cgroup/unified/job", 1000, 900, 20, 300)
    tree(tmp_path, files)
    assert control_groups(tmp_path) == [ControlGroup(5000, 4000, 30, 600), ControlGroup(1000, 900, 20, 300)]
    assert free_host_bytes(tmp_path) == 120


@pytest.mark.parametrize(
    ("line", "mount", "folder"),
    [
        ("0::/docker/1234/inner", "/docker/1234 /sys/fs/cgroup", "sys/fs/cgroup/inner"),
        ("0::/docker/1234", "/docker/1234 /sys/fs/cgroup", "sys/fs/cgroup"),
        ("0::/", "/ /the\\040groups", "the groups"),
    ],
)
def test_in_a_container_the_group_is_found_below_what_is_mounted(
    tmp_path: Path, line: str, mount: str, folder: str
) -> None:
    files = {"proc/self/cgroup": line + "\n", "proc/self/mountinfo": f"9 8 0:1 {mount} rw - cgroup2 cgroup2 rw\n"}
    assert free_host_bytes(tree(tmp_path, files | group(folder, 1000, 900))) == 100


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


def test_mounts_of_any_name_hide_no_limit_and_no_file_system(tmp_path: Path) -> None:
    mount = V2.replace("31 23", "30 23").replace("/sys/fs/cgroup rw", f"{ODD} rw")
    files = {
        "proc/self/cgroup": "0::/job\udcff\n",
        "proc/self/mountinfo": f"29 23 0:27 / {ODD} rw - fuse.x {ODD} rw\nnothing\n\n{mount}{V2}",
        "proc/mounts": f"{ODD} {ODD} tmpfs rw 0 0\n/dev/a / ext4 rw 0 0\nnothing\n/a /b xfs rw 0 0\n/c /b zfs rw 0 0\n",
        "proc/self/limits": "Max data size             5000                 unlimited            bytes\n",
        "proc/self/status": "Name:\tm\udcff\u2028VmData:\t9 kB\nVmData:\t2 kB\n",
    }
    files |= group("sys/fs/cgroup/job\udcff", 5000, 4800)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.fsencode(text))
    assert [each.limit for each in control_groups(tmp_path)] == [5000]
    assert private_bytes_left(tmp_path) == 5000 - 2048
    assert file_system(Path("/home"), tmp_path) == "ext4"
    assert file_system(Path("/media/m\udcff\u2028 a\\b\nc/home"), tmp_path) == "tmpfs"
    assert file_system(Path("/b/home"), tmp_path) == "zfs"  # the later of two mounts hides the other
    assert file_system(Path("/b"), tmp_path / "nowhere") == ""
    assert file_system(Path("/proc/self")) == "proc"
