"""The machine, the software and the command of a run: the header of a page and of a results file."""

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from benchmarks.harness.memory import MEMORY_KIND


def environment_facts() -> dict[str, str]:
    """Date, command, machine, software and kind of memory, in words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = [_cpu(), f"{cores} cores", f"{torch.get_num_threads()} torch threads"]
    machine.append(f"{psutil.virtual_memory().total / 2**30:.0f} GiB")
    machine.append(torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator")
    machine.append(f"load {psutil.getloadavg()[0]:.1f} before")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    software = [system, f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    software.append(f"gradstream {versions.get('gradstream', 'not installed')}")
    program = Path(sys.argv[0])  # a module run with ``-m`` shows itself as a path
    words = ["-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        # As a user types it; of an absolute path only the last part is shown.
        "command": shlex.join(["python", *(Path(w).name if os.path.isabs(w) else w for w in [*words, *sys.argv[1:]])]),
        "machine": ", ".join(machine),
        "software": ", ".join(software),
        "memory": f"peak of {MEMORY_KIND} bytes of each case's process",
    }


def filesystem_of(path: Path) -> str:
    """The kind of file system that holds ``path`` (``ext4``, ``tmpfs``); ``unknown`` where it cannot be told."""
    resolved, partitions = path.resolve(), psutil.disk_partitions(all=True)
    around = [partition for partition in partitions if resolved.is_relative_to(partition.mountpoint)]
    nearest = max(around, key=lambda partition: len(Path(partition.mountpoint).parts), default=None)
    return (nearest and nearest.fstype) or "unknown"


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/gradstream``, else ``~/.cache/gradstream``; not created here."""
    configured = os.environ.get("XDG_CACHE_HOME", "")  # the XDG specification says to ignore a relative one
    return Path(configured if os.path.isabs(configured) else Path.home() / ".cache", "gradstream")


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines() if information.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
