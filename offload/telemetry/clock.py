"""Measures how long cells and copies take: wall time on the CPU, CUDA events on a device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["LATEST", "Clock"]

#: Spans that a clock stores individually.
LATEST = 65


class Clock:
    """The total time of one kind of work, and the amount and the time of each of its latest spans."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._spans: deque[tuple[Any, Any, float, bool, bool]] = deque()
        #: Whether something disturbs the present step: its spans are stored separately.
        self.disturbed = True
        #: Amount and seconds of the latest spans, by whether they belong to a step that something disturbs.
        self._samples: dict[bool, deque[tuple[float, float]]] = {which: deque(maxlen=LATEST) for which in (True, False)}

    @contextlib.contextmanager
    def span(self, amount: float = 0, *, continues: bool = False) -> Iterator[None]:
        """Measures the time inside, for ``amount`` bytes or rows. ``continues`` adds it to the previous span."""
        if self._device.type != "cuda":
            start, done = time.perf_counter(), 0.0
            try:
                yield
                done = amount  # a failed span is not a sample
            finally:
                self.add(time.perf_counter() - start, done, disturbed=self.disturbed, continues=continues)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        done = 0.0
        begin.record(stream)
        try:
            yield
            done = amount
        finally:
            end.record(stream)
            self._spans.append((begin, end, done, self.disturbed, continues))
            if len(self._spans) > LATEST:  # bounds the events of a long run: each shard has clocks of its own
                self._wait_idle(wait=False)

    def _wait_idle(self, *, wait: bool) -> None:
        """Counts the spans that have ended, or ``wait``s for all of them; never waits within a step."""
        while self._spans:
            begin, end, amount, disturbed, continues = self._spans[0]
            if not wait and not end.query():
                return
            # Without this, elapsed_time() raises, since the events have not been recorded yet.
            end.synchronize()
            self.add(begin.elapsed_time(end) / 1e3, amount, disturbed=disturbed, continues=continues)
            self._spans.popleft()

    def add(self, seconds: float, amount: float = 0, *, disturbed: bool = False, continues: bool = False) -> None:
        """Counts a span; one without an amount, unless it ``continues`` the previous, is no sample."""
        self._seconds += seconds
        samples = self._samples[disturbed]
        if amount or (continues and samples):
            before = samples.pop() if continues and samples else (0.0, 0.0)
            samples.append((before[0] + amount, before[1] + seconds))

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        self._wait_idle(wait=True)
        return self._seconds

    def seconds_each(self) -> float:
        """Seconds per unit of work: the median over the latest spans, weighted by their amounts of work.

        The median ignores spans that other processes disturbed. Spans of the first step, and of others that were
        disturbed, are ignored once there are other ones. 0 without spans.
        """
        self._wait_idle(wait=True)
        samples = sorted((seconds / amount, amount) for amount, seconds in self._samples[False] or self._samples[True])
        half, below = sum(amount for _, amount in samples) / 2, 0.0
        for k, (each, amount) in enumerate(samples):
            below += amount
            if below == half:
                return (each + samples[k + 1][0]) / 2
            if below > half:
                return each
        return 0.0
