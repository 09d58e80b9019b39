"""Records a trace of steps: the spans of compute and of each lane, for https://ui.perfetto.dev.

Events carry the plan's tokens. On the CPU a lane's span is the time of its copy; on a CUDA device the host only queues
work, so there use ``torch.profiler``, whose ranges carry the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Event", "Tracer"]


@dataclass(frozen=True)
class Event:
    """One span on one track, in seconds since the trace began."""

    track: str
    token: str
    begin: float
    end: float


class Tracer:
    """Records spans while it is switched on; costs one comparison for each span while it is off."""

    def __init__(self) -> None:
        self._events: list[Event] | None = None
        self._samples: dict[str, list[tuple[float, int]]] = {}
        self._at_home: Callable[[], int] = int
        self._start = 0.0
        self._lock = threading.RLock()  # a store that is collected while it is held samples too

    @property
    def is_recording(self) -> bool:
        """Whether it is switched on."""
        return self._events is not None

    @contextlib.contextmanager
    def recording(self, at_home: Callable[[], int] = int) -> Iterator[list[Event]]:
        """Switches the tracer on; events are added to the list. ``at_home`` returns the bytes in storage."""
        if self._events is not None:
            raise RuntimeError("a trace of this model is being recorded already")
        events: list[Event] = []
        self._samples, self._at_home = {}, at_home
        self._start = time.perf_counter()
        self._events = events
        try:
            yield events
        finally:
            self._events = None

    @contextlib.contextmanager
    def span(self, track: str, token: str) -> Iterator[None]:
        """Records what happens inside, if the tracer is on."""
        events = self._events
        if events is None:
            yield
            return
        begin = time.perf_counter() - self._start
        try:
            yield
        finally:
            event = Event(track, token, begin, time.perf_counter() - self._start)
            with self._lock:
                events.append(event)

    def sample(self, nbytes: int) -> None:
        """Records the bytes that the engine holds on the compute device now, if the tracer is on."""
        if self._events is not None:
            with self._lock:
                now = time.perf_counter() - self._start
                for tier, held in (("bytes on device", nbytes), ("bytes at home", self._at_home())):
                    self._samples.setdefault(tier, []).append((now, held))

    def write(self, path: str | os.PathLike[str], events: list[Event]) -> None:
        """Writes events, and the bytes on the device and at home as counters, in the Trace Event Format."""
        tracks = {track: number for number, track in enumerate(dict.fromkeys(e.track for e in events))}

        def entry(kind: str, name: str, track: int = 0, **more: Any) -> dict[str, Any]:
            return {"ph": kind, "pid": 0, "tid": track, "name": name, **more}

        entries = [entry("M", "thread_name", number, args={"name": track}) for track, number in tracks.items()]
        for e in sorted(events, key=lambda e: e.begin):
            entries.append(entry("X", e.token, tracks[e.track], ts=e.begin * 1e6, dur=(e.end - e.begin) * 1e6))
        for tier, samples in self._samples.items():
            entries += [entry("C", tier, ts=when * 1e6, args={"bytes": nbytes}) for when, nbytes in samples]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": entries, "displayTimeUnit": "ms"}, file)
