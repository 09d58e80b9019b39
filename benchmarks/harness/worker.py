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
from benchmarks.harness.memory import memory_of


class Reporter:
    """Reports steps, phases and results of a case to the process that started it, as JSON lines."""

    def __init__(self, descriptor: int) -> None:
        self._lines = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)

    def event(self, event: str, value: Any = None) -> None:
        """Writes one line; ``value`` is JSON."""
        self._lines.write(json.dumps([event, value]) + "\n")

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
        """Reports that one step is done, with what was measured in it."""
        self.event("step", values)

    def phase(self, name: str) -> None:
        """Notes the bytes held now; from here on the peak is counted under ``name``, without what was freed before."""
        self.event("phase", [name, memory_of(os.getpid())[0]])


def main() -> None:
    """Runs the case that standard input names."""
    order = json.loads(sys.stdin.readline())
    report = Reporter(os.dup(1))
    os.dup2(2, 1)
    module, _, function = order["target"].partition(":")
    try:
        report.event("result", getattr(importlib.import_module(module), function)(report, **order["arguments"]))
    except CannotRunError as reason:
        report.event("skipped", str(reason))


if __name__ == "__main__":
    main()
