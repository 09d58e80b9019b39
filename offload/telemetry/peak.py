"""Measures the peak of memory during a step: of the process on the CPU, of the allocator on a device.

On Linux the kernel records the peak of a process's resident memory; writing ``5`` to ``/proc/self/clear_refs`` resets
it. File-mapped pages are subtracted, which the kernel counts for the present only: those of the begin or of now,
whichever are more. Otherwise a file that other code unmaps meanwhile, such as a checkpoint, would look like a rise.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

__all__ = ["PeakMeter", "anonymous_bytes"]

_KIB = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", re.MULTILINE)


def _status() -> dict[str, int]:
    """Bytes of each kind of resident memory; empty where the system does not say."""
    try:
        return {k.decode(): int(v) << 10 for k, v in _KIB.findall(Path("/proc/self/status").read_bytes())}
    except OSError:
        return {}


def anonymous_bytes() -> int:
    """Bytes of anonymous and shared memory of this process, which no file backs; 0 if the system does not say."""
    status = _status()
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _forget_peak() -> tuple[int, int]:
    """Resets the peak; returns the bytes of anonymous and shared memory, and of file-mapped pages."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = _status()
    return status.get("RssAnon", 0) + status.get("RssShmem", 0), status.get("RssFile", 0)


class PeakMeter:
    """How far memory rises above its begin; on the CPU also in parts of that time, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: int | None = None
        #: On the CPU: the peak of the parts that have ended, and the begin of the present one, with its mapped files.
        self._highest = self._part_began = self._files = 0

    def begin(self) -> None:
        """Begins to measure."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._began = torch.cuda.memory_allocated(self._device)
            return
        self._highest = 0
        try:
            self._part_began, self._files = _forget_peak()
        except OSError:
            self._began = None  # not permitted here
        else:
            self._began = self._part_began

    def begin_part(self) -> None:
        """Begins the next part, on the CPU."""
        if self._began is not None:
            self._highest = max(self._highest, self._peak_bytes())
            self._part_began, self._files = _forget_peak()

    def part_rise(self) -> int | None:
        """Bytes of the peak of the present part above its begin, on the CPU; None where it cannot be measured."""
        return None if self._began is None else max(0, self._peak_bytes() - self._part_began)

    def now(self) -> int | None:
        """Bytes above the begin now; None where it cannot be measured."""
        if self._began is None:
            return None
        cuda = self._device.type == "cuda"
        return (torch.cuda.memory_allocated(self._device) if cuda else anonymous_bytes()) - self._began

    def rise(self) -> int | None:
        """Bytes of the peak since :meth:`begin` above the begin; None where it cannot be measured."""
        if self._began is None:
            return None
        if self._device.type == "cuda":
            return max(0, torch.cuda.max_memory_allocated(self._device) - self._began)
        return max(0, max(self._highest, self._peak_bytes()) - self._began)

    def _peak_bytes(self) -> int:
        """The peak of anonymous and shared memory in the present part."""
        status = _status()
        return status.get("VmHWM", 0) - max(self._files, status.get("RssFile", 0))
