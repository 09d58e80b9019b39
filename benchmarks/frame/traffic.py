"""Bytes that a process reads and writes, as the kernel counts them, and which medium they pass.

``rchar`` and ``wchar`` of ``/proc/self/io`` hold what passed ``read`` and ``write`` of any kind, whether the page cache
or the disk had it; ``read_bytes`` and ``write_bytes`` what the device was asked for. Asynchronous I/O, which a peer may
use, is in the latter two only. What a call reads and the device does not was copied from the page cache, at the
memory's bandwidth: a limit that took it for the disk's would be too long, and flatter whoever stands beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Traffic", "bytes_of_step", "from_disk", "medium_bytes"]

COUNTERS = {"read": "rchar", "written": "wchar", "from_disk": "read_bytes", "to_disk": "write_bytes"}


class Traffic:
    """What this process has moved since the last time it was asked; nothing where no kernel counts it."""

    def __init__(self) -> None:
        self._before = _counters()

    def taken(self) -> dict[str, int]:
        """Bytes since the last call or the beginning: ``read``, ``written``, ``from_disk`` and ``to_disk``."""
        before, self._before = self._before, _counters()
        return {name: count - before[name] for name, count in self._before.items()}


def bytes_of_step(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Bytes read and written in a step: by calls, or at the device where that is more (asynchronous I/O has no calls).

    What the page cache drops or keeps differs from step to step, so the device's count is the mean of all.
    """
    read = max(_median(steps, "read"), from_disk(steps))
    return read, max(_median(steps, "written"), _mean(steps, "to_disk"))


def from_disk(steps: Sequence[Mapping[str, Any]]) -> float:
    """Bytes that a step read at the device."""
    return _mean(steps, "from_disk")


def medium_bytes(steps: Sequence[Mapping[str, Any]], *, copied_bytes: float = 0.0) -> dict[str, float]:
    """What a step's bytes pass, as ``Limits.step_seconds`` takes it; ``copied_bytes`` are those of other copies.

    All that is written reaches the disk; what is read from the page cache is copied in memory.
    """
    read, written = bytes_of_step(steps)
    on_disk = from_disk(steps)
    return {"read_bytes": on_disk, "written_bytes": written, "copied_bytes": copied_bytes + read - on_disk}


def _counters() -> dict[str, int]:
    try:
        with open("/proc/self/io", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return {}
    return {name: int(fields[field]) for name, field in COUNTERS.items()}


def _median(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(step.get(key, 0.0) for step in steps))


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.fmean(step.get(key, 0.0) for step in steps))
