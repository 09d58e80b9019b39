"""What a figure was measured on: without this header a table cannot be compared with anything, or made again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.frame.memory import memory_kind

__all__ = ["Environment", "ProcessorTime", "filesystem_of", "here", "processor_time", "shown_command"]

PACKAGES = ("gradstream", "numpy", "tokenizers")


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of all processors since the machine started: those that were asked for, and of them those not given.

    A virtual machine shares its processors with others. What these take is lost to whatever is measured meanwhile, and
    no load average shows it.
    """

    asked: float
    stolen: float

    def share_since(self, before: ProcessorTime) -> float | None:
        """Share of what was asked for since ``before`` that others got; None if that was less than a second."""
        asked = self.asked - before.asked
        return (self.stolen - before.stolen) / asked if asked >= 1 else None


def processor_time() -> ProcessorTime:
    """As the system counts it; nothing is stolen where it does not count that."""
    times = psutil.cpu_times()
    given = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    stolen = getattr(times, "steal", 0.0)
    return ProcessorTime(given + stolen, stolen)


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
    processor: ProcessorTime = field(default_factory=processor_time)  #: when this was made

    @property
    def stolen(self) -> float | None:
        """Share of the processor time asked for since then that the host gave to others."""
        return processor_time().share_since(self.processor)

    def as_json(self) -> dict[str, Any]:
        """A JSON object: the first line of the file that ``--json`` names."""
        fields = asdict(self)
        del fields["processor"]
        return {"environment": {**fields, "stolen": self.stolen}}

    def facts(self) -> list[tuple[str, str]]:
        """The header: what is told, and the words for it."""
        versions = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        busy = "" if self.load is None else f", load {self.load:.1f} before"
        if self.stolen is not None:
            busy += f", {self.stolen:.0%} of its processor time taken by others of its host"
        return [
            ("date", self.date),
            ("command", self.command),
            (
                "machine",
                f"{self.cpu}, {self.cores} cores, {self.threads} torch threads, "
                f"{self.memory_bytes / 2**30:.0f} GiB, {self.accelerator}{busy}",
            ),
            ("software", f"{self.system}, Python {self.python}, torch {self.torch}, {versions}"),
            ("memory", f"peak of {self.memory_kind} bytes of each rung's process"),
        ]

    def lines(self) -> list[str]:
        """The header for a person to read."""
        return [f"{name:<8} {text}" for name, text in self.facts()]


def here() -> Environment:
    """The environment of this process."""
    return Environment(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(),
        cpu=_cpu(),
        cores=_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        packages={name: _version(name) for name in PACKAGES},
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        memory_kind=memory_kind(),
    )


def filesystem_of(path: Path) -> str:
    """The kind of file system that holds ``path`` (``ext4``, ``tmpfs``); ``unknown`` where it cannot be told."""
    best, kind = -1, "unknown"
    resolved = path.resolve()
    for partition in psutil.disk_partitions(all=True):
        mount = Path(partition.mountpoint)
        if resolved.is_relative_to(mount) and len(mount.parts) > best:
            best, kind = len(mount.parts), partition.fstype or "unknown"
    return kind


def shown_command(words: Sequence[str]) -> str:
    """``python`` and these words as a user types them.

    A result is for other machines too: an absolute path, which only this one has, is told by its last part.
    """
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


def _cores() -> int:
    """Cores that this process may use, which is less than the machine has in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as information:
            for line in information:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
