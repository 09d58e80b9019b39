"""The machine, the software and the command of a run: the header of a page and of a results file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from benchmarks.harness.memory import MEMORY_KIND

PACKAGES = ("gradstream", "numpy", "tokenizers")


def processor_seconds() -> tuple[float, float]:
    """Seconds of all processors since the machine started: those asked for, and of them those given to other guests.

    A virtual machine shares its processors with others, which no load average shows.
    """
    times = psutil.cpu_times()
    given = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    stolen = getattr(times, "steal", 0.0)
    return given + stolen, stolen


@dataclass(frozen=True)
class Environment:
    """One machine, one moment, one command."""

    date: str
    command: str
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    accelerator: str
    system: str
    python: str
    torch: str
    packages: dict[str, str]
    load: float | None
    memory_kind: str
    stolen: float | None = None  #: share of the run's processor time that the host gave to others

    def ended(self, before: tuple[float, float]) -> Environment:
        """The same at the end of a run, with the share of the :func:`processor_seconds` since then that others took."""
        asked, stolen = (now - then for now, then in zip(processor_seconds(), before, strict=True))
        return replace(self, stolen=stolen / asked if asked >= 1 else None)

    def facts(self) -> list[tuple[str, str]]:
        """The rows of the header: name and words."""
        versions = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        busy = "" if self.load is None else f", load {self.load:.1f} before"
        if self.stolen is not None:
            busy += f", {self.stolen:.0%} of its processor time taken by others of its host"
        machine = f"{self.cpu}, {self.cores} cores, {self.threads} torch threads, {self.memory_bytes / 2**30:.0f} GiB"
        return [
            ("date", self.date),
            ("command", self.command),
            ("machine", f"{machine}, {self.accelerator}{busy}"),
            ("software", f"{self.system}, Python {self.python}, torch {self.torch}, {versions}"),
            ("memory", f"peak of {self.memory_kind} bytes of each case's process"),
        ]


def here() -> Environment:
    """The environment of this process."""
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        packages={name: _version(name) for name in PACKAGES},
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_kind=MEMORY_KIND,
    )


def filesystem_of(path: Path) -> str:
    """The kind of file system that holds ``path`` (``ext4``, ``tmpfs``); ``unknown`` where it cannot be told."""
    resolved, partitions = path.resolve(), psutil.disk_partitions(all=True)
    around = [partition for partition in partitions if resolved.is_relative_to(partition.mountpoint)]
    nearest = max(around, key=lambda partition: len(Path(partition.mountpoint).parts), default=None)
    return (nearest and nearest.fstype) or "unknown"


def shown_command(words: Sequence[str]) -> str:
    """``python`` and these words as a user types them; of an absolute path only the last part is shown."""
    return shlex.join(["python", *(Path(word).name if os.path.isabs(word) else word for word in words)])


def _command() -> str:
    """The command line of this process; a module run with ``-m`` shows itself as a path."""
    program = Path(sys.argv[0])
    words = ["-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shown_command([*words, *sys.argv[1:]])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines() if information.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
