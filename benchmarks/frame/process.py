"""The process of one rung, from its start to its outcome; it runs on its own, or waits for its turn.

Guarantees: inside the context there is at most one process, and after it none, whatever was raised; what the rung
reports is in ``outcome`` as soon as the call that was listening returns. Assumes: the function of the rung calls
``report.turns()`` if :meth:`RungProcess.turn` is used; one that does not ends within the first turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.frame.memory import PeakMeter
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.peers import Absent, find_peer

__all__ = ["RungProcess"]

PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # holds ``benchmarks``: the child imports the same code
EXIT_SECONDS = 60.0  # for an interpreter to leave after its last event

Listener = Callable[[dict[str, Any]], None]


class RungProcess:
    """One rung's process. A rung whose peer cannot be found has none: its outcome says why it was skipped."""

    def __init__(self, rung: Rung, on_event: Listener = lambda event: None) -> None:
        self.outcome = Outcome(rung)
        self._on_event = on_event
        self._process: subprocess.Popen[str] | None = None
        self._ready = False  # it has built what it needs, and waits for a turn
        self._started = 0.0

    def __enter__(self) -> RungProcess:
        rung = self.outcome.rung
        python = sys.executable
        if rung.peer:
            found = find_peer(rung.peer)
            if isinstance(found, Absent):
                self.outcome.skipped = found.reason
                return self
            python, self.outcome.version = found.python, found.version
        search = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        self._started = time.perf_counter()
        # A file, not a pipe: nobody reads it while the rung runs, and a full pipe would stop the rung.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.frame.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**rung.environment, **os.environ, "PYTHONPATH": search},
            encoding="utf-8",
        )
        self._meter = PeakMeter(self._process.pid)
        self._meter.__enter__()
        self._say(json.dumps({"target": rung.target, "arguments": rung.arguments}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._end(-signal.SIGKILL)

    def turn(self) -> list[dict[str, Any]]:
        """Lets the rung go on until it waits for its next turn, or ends; the steps that it reported meanwhile.

        The first call also waits for whatever the rung does before its first turn; see :meth:`prepare`.
        """
        self.prepare()
        reported = len(self.outcome.steps)
        self._say("turn")
        self._listen()
        return self.outcome.steps[reported:]

    def prepare(self) -> None:
        """Waits until the rung has built what it needs and stands ready for its first turn; or until it has ended."""
        if self._process is not None and not self._ready:
            self._listen()

    def finish(self) -> Outcome:
        """No more turns: hears the rung to its end. The outcome is complete, and the process is gone."""
        process = self._process
        if process is None:
            return self.outcome
        try:
            self._say(None)
            while self._listen():
                pass
            # Its output is closed but it may still be leaving: killed now, its own exit status would be lost.
            code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.outcome.result, code = None, -signal.SIGKILL
        self._end(code)
        return self.outcome

    def _say(self, line: str | None) -> None:
        """One line for the child; None closes its input."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            if line is None:
                self._process.stdin.close()
            else:
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died before it read; the exit code says of what

    def _listen(self) -> bool:
        """Takes in events until the child waits for its turn (True) or closes its output (False)."""
        if self._process is None:
            return False
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._take(event)
            if event["event"] == "ready":
                self._ready = True
                return True
            self._on_event(event)
        return False

    def _take(self, event: dict[str, Any]) -> None:
        outcome = self.outcome
        if event["event"] == "step":
            outcome.steps.append(event["values"])
        elif event["event"] == "phase":
            self._meter.phase(event["name"])
        elif event["event"] == "memory":
            outcome.moments[event["moment"]] = event["bytes"]
        elif event["event"] == "skip":
            outcome.skipped = event["reason"]
        elif event["event"] == "result":
            outcome.result = event["values"]

    def _end(self, code: int) -> None:
        """The process is gone, its peaks are noted, and a failure has its reason."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()  # without effect on a process that has ended
        process.wait()
        self._meter.__exit__(None, None, None)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        outcome = self.outcome
        outcome.peaks = self._meter.peaks
        outcome.data_peak_bytes = self._meter.data_peak_bytes
        outcome.seconds = time.perf_counter() - self._started
        with self._errors:
            if outcome.skipped is not None:
                outcome.result = None
            elif outcome.result is None:
                self._errors.seek(0)
                outcome.failure = _reason(code, self._errors.read())


def _reason(code: int, errors: str) -> str:
    """One line for a rung that gave no result."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}" + (f": {lines[-1].strip()}" if lines else "")
