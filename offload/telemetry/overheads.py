"""Measures the seconds of a step in which no cell computes and nothing is waited for: what the engine itself takes.

===========  =========================================================================================================
span         what is measured, without cells and waits
===========  =========================================================================================================
forward      of a pass, for each of its cells: the engine, with the return of free memory, and code between blocks
backward     the same of a backward
loss         from the end of a forward to the begin of its backward
norm         in ``optimizer.step()``, for each byte of gradients whose norm it computes
step         the rest of ``optimizer.step()``, without updates that it waits for, and ``zero_grad()``
===========  =========================================================================================================

On a CUDA device the host works ahead of what is computed, so there nothing is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from offload.telemetry.clock import Clock

__all__ = ["OverheadMeter"]


class OverheadMeter:
    """The overheads of one model's steps; ``busy`` returns the seconds of its cells and waits so far."""

    def __init__(self, device: torch.device, busy: Callable[[], float]) -> None:
        self._measures = device.type == "cpu"
        self._busy = busy
        self._clocks = {kind: Clock(device) for kind in ("forward", "backward", "loss", "norm", "step")}
        #: Cells that began so far, and the seconds of what is not to be counted: other spans, a wait for updates.
        self.cells = 0
        self._excluded = 0.0
        #: When the last forward ended, until another pass begins.
        self._forward_ended: float | None = None
        #: Seconds in calls of optimizers so far, with what they waited for.
        self.optimizer_seconds = 0.0

    def begin_step(self, *, disturbed: bool) -> None:
        """See :meth:`.Clock.begin_step`."""
        for clock in self._clocks.values():
            clock.begin_step(disturbed=disturbed)

    def seconds_each(self, kind: str) -> float:
        """Seconds of a kind of span for each cell, for each byte, or in one step; 0 before an undisturbed step.

        The first step and those that measure memory take several times as long here.
        """
        clock = self._clocks[kind]
        return clock.seconds_each() if clock.counts else 0.0

    @contextlib.contextmanager
    def in_pass(self, kind: str) -> Iterator[None]:
        """A ``"forward"`` or ``"backward"`` with gradients."""
        if not self._measures:
            yield
            return
        ended, self._forward_ended = self._forward_ended, None
        if ended is not None and kind == "backward":
            self._clocks["loss"].add(time.perf_counter() - ended, 1)
        cells, began, before = self.cells, time.perf_counter(), self._busy() + self._excluded
        yield
        now = time.perf_counter()
        if self.cells > cells:
            self._clocks[kind].add(max(0.0, now - began - (self._busy() + self._excluded - before)), self.cells - cells)
        if kind == "forward":
            self._forward_ended = now

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """A context whose time is not counted in the span around it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - began

    @contextlib.contextmanager
    def optimizer(self, *, continues: bool = False) -> Iterator[None]:
        """A call of an optimizer: ``step()``, or one that ``continues`` the last step."""
        began, before = time.perf_counter(), self._excluded
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.optimizer_seconds += seconds
        if self._measures:
            own = max(0.0, seconds - (self._excluded - before))
            self._clocks["step"].add(own, 0 if continues else 1, continues=continues)

    @contextlib.contextmanager
    def norms(self, nbytes: int) -> Iterator[None]:
        """Computes norms of gradients of so many bytes, in a call of an optimizer."""
        began = time.perf_counter()
        with self.excluded():
            yield
        if self._measures:
            self._clocks["norm"].add(time.perf_counter() - began, nbytes)
