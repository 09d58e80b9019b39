"""Records a trace of steps: the spans of compute and of each lane, for https://ui.perfetto.dev.

Events carry the plan's tokens. On the CPU a lane's span is the time of its copy; on a CUDA device the host only queues
work, so there use ``torch.profiler``, whose ranges carry the same tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
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
        self._start = 0.0

    @property
    def is_recording(self) -> bool:
        """Whether it is switched on."""
        return self._events is not None

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Switches the tracer on; events are added to the list, by several threads."""
        if self._events is not None:
            raise RuntimeError("a trace of this model is being recorded already")
        events: list[Event] = []
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
            events.append(Event(track, token, begin, time.perf_counter() - self._start))

    def write(self, path: str | os.PathLike[str], events: list[Event]) -> None:
        """Writes events in the Trace Event Format."""
        tracks = {track: number for number, track in enumerate(dict.fromkeys(e.track for e in events))}

        def entry(kind: str, name: str, track: int = 0, **more: Any) -> dict[str, Any]:
            return {"ph": kind, "pid": 0, "tid": track, "name": name, **more}

        entries = [entry("M", "thread_name", number, args={"name": track}) for track, number in tracks.items()]
        for e in sorted(events, key=lambda e: e.begin):
            entries.append(entry("X", e.token, tracks[e.track], ts=e.begin * 1e6, dur=(e.end - e.begin) * 1e6))
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": entries, "displayTimeUnit": "ms"}, file)
