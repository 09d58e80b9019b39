"""The process of one case, from its start to its outcome; it runs on its own or waits for its turns.

Inside the context there is at most one process, and after it none, whatever was raised; what the case reported is in
``outcome`` as soon as the call that listened returns.
"""

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
from typing import Any

from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.memory import PeakMeter
from benchmarks.harness.peers import find_peer

PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # holds ``benchmarks``: the child imports the same code
EXIT_SECONDS = 60.0  # for an interpreter to end after its last event
Listener = Callable[[dict[str, Any]], None]


def python_path() -> str:
    """``PYTHONPATH`` of a child: this project first."""
    return os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))


class CaseProcess:
    """The process of one case. A case whose peer is not found has none: its outcome says why it was skipped."""

    def __init__(self, case: Case, on_event: Listener = lambda event: None) -> None:
        self.outcome = Outcome(case)
        self._on_event = on_event
        self._process: subprocess.Popen[str] | None = None
        self._ready = False  # it has built what it needs, and waits for a turn
        self._started = time.perf_counter()

    def __enter__(self) -> "CaseProcess":
        case, python = self.outcome.case, sys.executable
        if case.peer:
            found = find_peer(case.peer)
            if isinstance(found, str):
                self.outcome.skipped = found
                return self
            python, self.outcome.version = found.python, found.version
        # A file, not a pipe: it is read at the end only, and a full pipe would stop the case.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.harness.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**case.environment, **os.environ, "PYTHONPATH": python_path()},
            encoding="utf-8",
        )
        self._meter = PeakMeter(self._process.pid)
        self._meter.__enter__()
        self._say(json.dumps({"target": case.target, "arguments": case.arguments}))
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._end(-signal.SIGKILL)

    @property
    def alive(self) -> bool:
        """Whether it still waits for turns; False before :meth:`prepare`."""
        return self._process is not None and self._ready

    def prepare(self) -> None:
        """Lets the case build what it needs, until it waits for its first turn or has ended."""
        if self._process is not None and not self._ready:
            self._ready = self._listen()

    def turn(self) -> list[dict[str, Any]]:
        """Lets the case run until it waits for its next turn, or ends; the steps that it reported meanwhile."""
        self.prepare()
        reported = len(self.outcome.steps)
        if self.alive:
            self._say("turn")
            self._ready = self._listen()
        return self.outcome.steps[reported:]

    def finish(self) -> Outcome:
        """Grants no more turns and waits for the end. The outcome is complete, and the process is gone."""
        process = self._process
        if process is None:
            return self.outcome
        try:
            self._say(None)
            while self._listen():
                pass
            # Its output is closed, but it may still be ending: killed now, its own exit status would be lost.
            code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.outcome.result, code = None, -signal.SIGKILL
        self._end(code)
        return self.outcome

    def _say(self, line: str | None) -> None:
        """Writes one line to the child; None closes its input."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it read; the exit code says of what
            if line is None:
                self._process.stdin.close()
            else:
                self._process.stdin.write(f"{line}\n")
                self._process.stdin.flush()

    def _listen(self) -> bool:
        """Reads events until the child waits for its turn (True) or closes its output (False)."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return True
            self._take(event)
            self._on_event(event)
        return False

    def _take(self, event: dict[str, Any]) -> None:
        outcome, kind = self.outcome, event["event"]
        if kind == "step":
            outcome.steps.append(event["values"])
        elif kind == "phase":
            self._meter.phase(event["name"])
        elif kind == "memory":
            outcome.moments[event["moment"]] = event["bytes"]
        elif kind == "skip":
            outcome.skipped = event["reason"]
        elif kind == "result":
            outcome.result = event["values"]

    def _end(self, code: int) -> None:
        """Kills what is left of the process, notes its peaks, and gives a failure its reason."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()  # without effect on a process that has ended
        process.wait()
        self._meter.__exit__()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        outcome = self.outcome
        outcome.peaks = self._meter.peaks
        outcome.data_peak_bytes = self._meter.data_peak_bytes
        outcome.seconds = time.perf_counter() - self._started
        with self._errors:
            if outcome.result is None and outcome.skipped is None:
                self._errors.seek(0)
                outcome.failure = _reason(code, self._errors.read())


def _reason(code: int, errors: str) -> str:
    """One line for a case that gave no result."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}" + (f": {lines[-1].strip()}" if lines else "")
