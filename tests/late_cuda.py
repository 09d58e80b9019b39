"""A CUDA device that runs late, without one: streams hold what they are given until the host waits for it.

A stream runs only as far as it is made to: by a host that synchronises, or another stream that waits for an event
while it is being run itself. So what is not ordered by an event is not done, every time. Work is a function, given by
:meth:`LateCuda.launch` to the current stream of the calling thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

__all__ = ["LateCuda", "LateStream"]

DEVICE = torch.device("cuda", 0)


class LateEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded: tuple[LateStream, int] | None = None

    def record(self, stream: LateStream) -> None:
        self.recorded = stream, len(stream.given)

    def reach(self) -> None:
        """As in CUDA, an event that was never recorded is no reason to wait."""
        if self.recorded is not None:
            self.recorded[0].run(self.recorded[1])

    def query(self) -> bool:
        return self.recorded is None or self.recorded[0].done >= self.recorded[1]

    def synchronize(self) -> None:
        LateCuda.host_waits += 1
        self.reach()

    def elapsed_time(self, end: LateEvent) -> float:
        if self.recorded is None or end.recorded is None or not (self.query() and end.query()):
            raise RuntimeError("both events must be recorded and completed")
        return 1.0


class LateStream:
    device = DEVICE

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.given: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.given[self.done - 1]()

    def wait_event(self, event: LateEvent) -> None:
        self.given.append(event.reach)

    def wait_stream(self, other: LateStream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> LateEvent:
        event = LateEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        LateCuda.host_waits += 1
        self.run(len(self.given))


class LateCuda:
    """Takes the place of ``torch.cuda`` while a test runs."""

    #: How often the host waited for the device.
    host_waits = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._local = threading.local()
        self.compute = LateStream()
        LateCuda.host_waits = 0
        monkeypatch.setattr(torch.cuda, "Stream", LateStream)
        monkeypatch.setattr(torch.cuda, "Event", LateEvent)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())

    def current_stream(self, device: object = None) -> LateStream:
        stream: Any = getattr(self._local, "stream", self.compute)
        return stream  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def launch(self, work: Callable[[], object]) -> None:
        """Queues work on the current stream."""
        self.current_stream().given.append(lambda: (work(), None)[1])

    def synchronize(self) -> None:
        """Compute comes to its end."""
        self.compute.run(len(self.compute.given))
