"""Measures the peak of memory during a step: of the process on the CPU, of the allocator on a device.

On Linux the kernel records the peak of a process's resident memory; writing ``5`` to ``/proc/self/clear_refs`` resets
it. File-mapped pages are subtracted, which the kernel counts for the present only: those of the begin or of now,
whichever are more. Otherwise a file that other code unmaps meanwhile, such as a checkpoint, would look like a rise.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from offload.storage.buffer import has_own_memory

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


class PeakMeter:
    """How far memory rises above its begin."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: What is held at the begin.
        self.began = 0
        self._measures = False
        #: On the CPU: the mapped files at the begin.
        self._files = 0

    def begin(self) -> None:
        """Begins to measure."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.began, self._measures = torch.cuda.memory_allocated(self._device), True
            return
        self._measures = False
        if has_own_memory(self._device):
            return
        with contextlib.suppress(OSError):  # not permitted here
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets it
            self.began, self._files = anonymous_bytes(), _status().get("RssFile", 0)
            self._measures = True

    def rise(self) -> int | None:
        """Bytes of the peak since :meth:`begin` above the begin; None where it cannot be measured."""
        if not self._measures:
            return None
        if self._device.type == "cuda":
            return max(0, torch.cuda.max_memory_allocated(self._device) - self.began)
        status = _status()
        peak = status.get("VmHWM", 0) - max(self._files, status.get("RssFile", 0))
        return max(0, peak - self.began)
