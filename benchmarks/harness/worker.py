"""The process of one case: calls its function and writes what happens as JSON lines.

``python -m benchmarks.harness.worker`` reads ``{"target": "package.module:function", "arguments": {}}`` from the first
line of standard input and calls ``function(report, **arguments)``. Each further line grants one turn. Every line of
standard output is an event; whatever the case prints goes to standard error, where it cannot break the protocol.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.memory import resident_bytes


class Reporter:
    """What a case tells its parent while it runs."""

    def __init__(self, descriptor: int) -> None:
        self._lines = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)

    def event(self, event: str, **values: Any) -> None:
        """One line; ``values`` are JSON."""
        self._lines.write(json.dumps({"event": event, **values}) + "\n")

    def total(self, steps: int) -> None:
        """How many calls of :meth:`step` will follow, for the progress bar."""
        self.event("total", steps=steps)

    def turns(self) -> Iterator[int]:
        """Waits for the parent before each turn and ends when it grants no more: ``for k in report.turns(): ...``."""
        k = 0
        while True:
            self.event("ready")
            if not sys.stdin.readline():
                return
            yield k
            k += 1

    def step(self, **values: Any) -> None:
        """One step is done, and this is what it measured."""
        self.event("step", values=values)

    def phase(self, name: str) -> None:
        """From here on the parent counts the peak under ``name``; memory of earlier phases must be freed by now."""
        self.event("phase", name=name)

    def memory(self, moment: str) -> None:
        """Notes the bytes that the process holds now under the name ``moment``."""
        self.event("memory", moment=moment, bytes=resident_bytes(os.getpid()))


def main() -> None:
    """Runs the case that standard input names."""
    order = json.loads(sys.stdin.readline())
    report = Reporter(os.dup(1))
    os.dup2(2, 1)
    module, _, function = order["target"].partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(report, **order["arguments"])
        report.event("result", values=result)
    except CannotRunError as reason:
        report.event("skip", reason=str(reason))


if __name__ == "__main__":
    main()
