"""Measures what the steps of one model take beside what is counted.

Plans count tensors that are known: weights, gradients, states, boundaries, activations. A process holds more: buffers
inside of operations, what its allocator keeps for reuse, the graph of the loss. On the CPU that is the rise of its
anonymous memory since the model was made, less what is counted. It is reported, and decides nothing: plans follow from
counted bytes alone, and free memory is returned to the system where the process outgrows the limit. On a device, whose
allocator counts exactly, later plans leave so much free.

Rows longer than all before were predicted from other sizes: their first step tells nothing of this.
"""

from __future__ import annotations

from collections import deque

import torch

from offload.heap import return_freed_memory
from offload.limits import GAPS_SHARE
from offload.planning.choose import Prediction
from offload.planning.rows import remember
from offload.storage.buffer import has_own_memory
from offload.telemetry.peak import PeakMeter, anonymous_bytes

__all__ = ["StepMemory", "bound_of"]

#: Of a limit of memory on the CPU, what the allocator of the process may keep beside it: a share, and bytes.
ALLOCATOR_SHARE, ALLOCATOR_BYTES = 0.1, 32 << 20
#: Free memory is returned again when the process has grown by one part in so many of the limit.
GROWTH_SHARE = 16
#: The latest steps that tell of the next ones.
LATEST = 5


def bound_of(limit_bytes: int, device: torch.device) -> int:
    """The most that a step may take by measurement, with a limit of so many bytes."""
    return limit_bytes + (int(ALLOCATOR_SHARE * limit_bytes) + ALLOCATOR_BYTES if not has_own_memory(device) else 0)


class StepMemory:
    """The memory of steps of a model on one device.

    ``made_bytes``: anonymous memory of the process before the model was made.
    """

    def __init__(self, device: torch.device, made_bytes: int) -> None:
        #: Whether it is the memory of the host.
        self.on_host = not has_own_memory(device)
        self._peak = PeakMeter(device)
        #: Anonymous memory of the process after free memory was returned; and before the model was made, which may have
        #: freed what layers had before.
        self._returned = anonymous_bytes()
        self._made = min(made_bytes, self._returned)
        #: Rows of a batch -> what its latest steps took beside what is counted.
        self._beside: dict[float, deque[int]] = {}
        #: The peak of the last step that was measured.
        self.peak_bytes: int | None = None
        #: Whether slots and buffers of the present plan are still to be allocated; whether they were in the last step.
        self.fresh, self._was_fresh = True, False

    def beside(self, rows: float) -> int:
        """What steps of a batch of so many rows may take beside what is counted: as much as smaller ones have taken.

        And as much as the next larger one: only that size itself tells that it is less.
        """
        larger = min((size for size in self._beside if size >= rows), default=rows)
        return max((max(latest) for size, latest in self._beside.items() if size <= larger), default=0)

    def grown_bytes(self) -> int:
        """On the CPU: what the process holds more than when the model was made."""
        return anonymous_bytes() - self._made if self.on_host else 0

    def begin(self) -> None:
        """Begins a step."""
        self._peak.begin()

    def return_excess(self, limit_bytes: int) -> None:
        """On the CPU, returns free memory to the system if the process has outgrown what plans fill of the limit.

        Again only when it has grown by a part of it: what other code holds cannot be returned.
        """
        if not self.on_host:
            return
        held, most = anonymous_bytes(), limit_bytes - limit_bytes // GAPS_SHARE
        if held - self._made > most and held > self._returned + limit_bytes // GROWTH_SHARE:
            return_freed_memory()
            self._returned = anonymous_bytes()
        else:
            self._returned = min(self._returned, held)

    def end(self, rows: float, predicted: Prediction | None, *, probes: bool) -> int | None:
        """Ends a step of a batch of so many rows; returns the bytes that it took, with what is counted at its begin.

        ``probes``: its prediction is that of other sizes, and so no measure of what it leaves out.
        """
        rise = self._peak.rise()
        # What is made in the first step of a plan is not there at its begin.
        fresh, self.fresh = self.fresh, self.fresh and predicted is None
        counted = 0 if fresh or predicted is None else predicted.peak.begin
        grown = self._peak.began - self._made if self.on_host else 0
        self.peak_bytes = None if rise is None else rise + max(counted, grown)
        if self.on_host and (fresh or self._was_fresh):  # what moves, and is made, in the first step of a plan
            self._beside.clear()
        self._was_fresh = fresh
        if predicted is not None and not probes and self.peak_bytes is not None and (self.on_host or not fresh):
            latest = self._beside.get(rows, deque[int](maxlen=LATEST))
            latest.append(max(0, self.peak_bytes - predicted.peak.memory))
            remember(self._beside, rows, latest)
        return None if rise is None else rise + counted
