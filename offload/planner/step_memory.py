"""Measures the memory of the steps of one model.

A device's allocator is measured exactly: what a step took more than predicted becomes a margin of later predictions for
batches of its size and larger ones. The first step of rows longer than all before gives none: it was predicted from
other sizes.

On the CPU a process is measured, whose allocator keeps free memory between its blocks and for reuse, and whose other
code takes memory, too: plans follow from counted bytes alone. Where the process outgrows the limit, free memory is
returned to the system.
"""

from __future__ import annotations

import torch

from offload.planning.budget import GAPS_SHARE
from offload.planning.choose import Prediction
from offload.storage.buffer import has_own_memory
from offload.streaming.heap import return_freed_memory
from offload.telemetry.peak import PeakMeter, anonymous_bytes

__all__ = ["StepMemory", "bound_of"]

#: Of a limit of memory on the CPU, what the allocator of the process may keep beside it: a share, and bytes.
ALLOCATOR_SHARE, ALLOCATOR_BYTES = 0.1, 32 << 20
#: Free memory is returned again when the process has grown by one part in so many of the limit.
GROWTH_SHARE = 16


def bound_of(limit_bytes: int, device: torch.device) -> int:
    """The most that a step may take by measurement, with a limit of so many bytes."""
    return limit_bytes + (int(ALLOCATOR_SHARE * limit_bytes) + ALLOCATOR_BYTES if not has_own_memory(device) else 0)


class StepMemory:
    """The memory of steps of a model on one device."""

    def __init__(self, device: torch.device) -> None:
        #: Whether it is the memory of the host.
        self.on_host = not has_own_memory(device)
        self._device = device
        self._peak = PeakMeter(device)
        #: Anonymous memory of the process when the model was made, and after free memory was returned.
        self._began = self._returned = anonymous_bytes()
        #: Rows of a batch -> what its steps took more than predicted; and those whose plan had settled by then.
        self._margins: dict[float, int] = {}
        self._settled: set[float] = set()
        #: Of the present step.
        self.margin_bytes = 0
        self._rows = 0.0
        #: The peak of the last step that was measured.
        self.peak_bytes: int | None = None
        #: Whether slots and buffers of the present plan are still to be allocated.
        self.fresh = True

    def margin(self, rows: float) -> int:
        """What steps of a batch of so many rows may take more than predicted: as much as smaller ones have taken.

        And as much as the next larger one: only that size itself tells that it is less.
        """
        larger = min((size for size in self._margins if size >= rows), default=rows)
        return max((nbytes for size, nbytes in self._margins.items() if size <= larger), default=0)

    def grown_bytes(self) -> int:
        """On the CPU: what the process holds more than when the model was made."""
        return anonymous_bytes() - self._began if self.on_host else 0

    def begin(self, rows: float) -> None:
        """Begins a step with so many rows."""
        self._rows, self.margin_bytes = rows, self.margin(rows)
        self._peak.begin()

    def return_excess(self, limit_bytes: int) -> None:
        """On the CPU, returns free memory to the system if the process has outgrown what plans fill of the limit.

        Again only when it has grown by a part of it: what other code holds cannot be returned.
        """
        if not self.on_host:
            return
        held, most = anonymous_bytes(), limit_bytes - limit_bytes // GAPS_SHARE
        if held - self._began > most and held > self._returned + limit_bytes // GROWTH_SHARE:
            return_freed_memory()
            self._returned = anonymous_bytes()
        else:
            self._returned = min(self._returned, held)

    def end(self, predicted: Prediction | None, *, probes: bool = False) -> bool:
        """Ends a step; returns whether the margin has changed.

        The first step of a plan may make what no prediction had counted yet, such as states of an optimizer, which
        later ones count. So its margin holds until a step has found all of it there. ``probes``: its prediction is that
        of other sizes, and so no measure of what plans of its own exceed.
        """
        rise = self._peak.rise()
        if rise is None or predicted is None:
            self.peak_bytes = rise
            return False
        # What is made in the first step of a plan is not there at its begin.
        fresh, self.fresh = self.fresh, False
        peak = rise + (0 if fresh else predicted.peak.begin)
        if not fresh:
            self.peak_bytes = peak
        if probes or self.on_host:
            return False
        more = max(0, peak - predicted.peak.memory)
        if not fresh and self._rows not in self._settled:
            self._settled.add(self._rows)
            self._margins[self._rows] = more
        elif more > self.margin_bytes:
            self._margins[self._rows] = more
        before, self.margin_bytes = self.margin_bytes, self.margin(self._rows)
        return self.margin_bytes != before
