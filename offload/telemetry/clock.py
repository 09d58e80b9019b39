"""Clocks of the engine: how long cells and copies take, on the CPU by the wall clock, on a CUDA device by events."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["LATEST", "Clock"]

#: Spans that a clock remembers one by one.
LATEST = 65


class Clock:
    """The time that compute spends in a kind of work: by the wall on the CPU, by events on a CUDA device.

    It is added up, and the latest spans are remembered one by one, each with the amount of work that it did.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._spans: deque[tuple[Any, Any, int, bool, bool]] = deque()
        self._first = True
        #: Amount and seconds of spans, apart: those of the first step, and later ones.
        self._samples: dict[bool, deque[tuple[int, float]]] = {first: deque(maxlen=LATEST) for first in (True, False)}

    @contextlib.contextmanager
    def span(self, amount: int = 0, *, goes_on: bool = False) -> Iterator[None]:
        """Counts what happens inside: so many bytes, or rows. What ``goes_on`` is remembered with the one before."""
        if self._device.type != "cuda":
            start, done = time.perf_counter(), 0
            try:
                yield
                done = amount  # what failed says nothing of how long it takes
            finally:
                self._count(time.perf_counter() - start, done, self._first, goes_on)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        done = 0
        begin.record(stream)
        try:
            yield
            done = amount
        finally:
            end.record(stream)
            self._spans.append((begin, end, done, self._first, goes_on))
            if len(self._spans) >= 4096:  # so that a long run does not hoard events
                self._wait_idle(wait=False)

    def _wait_idle(self, *, wait: bool) -> None:
        """Counts the spans that have ended; all of them if the host is to ``wait``, which it never is in a step."""
        while self._spans:
            begin, end, amount, first, goes_on = self._spans[0]
            if not wait and not end.query():
                return
            # Without this, the time between events that have not happened yet is asked for, which is an error.
            end.synchronize()
            self._count(begin.elapsed_time(end) / 1e3, amount, first, goes_on)
            self._spans.popleft()

    def _count(self, seconds: float, amount: int, first: bool, goes_on: bool = False) -> None:
        self._seconds += seconds
        if amount:
            samples = self._samples[first]
            before = samples.pop() if goes_on and samples else (0, 0.0)
            samples.append((before[0] + amount, before[1] + seconds))

    def first_step_ends(self) -> None:
        """What was counted up to now is set apart; nobody waits for what has not ended yet."""
        self._first = False

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        self._wait_idle(wait=True)
        return self._seconds

    def seconds_each(self) -> float:
        """Seconds for one unit of the work: half of the work of the latest spans went faster, half of it slower.

        So a span that something else on the machine disturbed does not count for more than another. Spans of the first
        step are left out as soon as there are others. 0 where nothing was seen.
        """
        self._wait_idle(wait=True)
        samples = sorted((seconds / amount, amount) for amount, seconds in self._samples[False] or self._samples[True])
        half, below = sum(amount for _, amount in samples) / 2, 0
        for k, (each, amount) in enumerate(samples):
            below += amount
            if below == half:
                return (each + samples[k + 1][0]) / 2
            if below > half:
                return each
        return 0.0
