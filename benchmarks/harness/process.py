"""The process of one case, from its start to its outcome; it runs on its own or waits for its turns.

Inside the context there is at most one process, and after it none, whatever was raised.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.memory import PeakMeter
from benchmarks.harness.peers import find_peer

PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # holds ``benchmarks``: the child imports the same code
EXIT_SECONDS = 60.0  # for an interpreter to end after its last event


def python_path() -> str:
    """``PYTHONPATH`` of a child: this project first; a child may work in another folder."""
    users = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([str(PACKAGE_ROOT), *users])


class CaseProcess:
    """The process of one case, which works in ``folder``. Where its peer is not found, ``outcome`` says so."""

    def __init__(self, case: Case, folder: str | Path) -> None:
        self.outcome = Outcome(case)
        self.waiting = False  #: it has built what it needs, and waits for a turn
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process and lets it build what it needs, until it waits for its first turn or has ended."""
        case, python = self.outcome.case, sys.executable
        print(f"{case.name} ...", flush=True)
        try:
            if case.peer:
                python, self.outcome.version = find_peer(case.peer)
        except CannotRunError as reason:
            self.outcome.skipped = str(reason)
            return
        self._started = time.perf_counter()
        # A file, not a pipe: it is read at the end only, and a full pipe would stop the case.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        with _terminated_later():  # else a process that was just started is not known yet
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.harness.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=self._folder,
                env={**case.environment, **os.environ, "PYTHONPATH": python_path()},
                text=True,
            )
            self._meter = PeakMeter(self._process.pid)
        self._say(json.dumps({"target": case.target, "arguments": case.arguments}))

    def turn(self) -> dict[str, Any] | None:
        """Lets the case run until it waits for its next turn, or ends; the step that it reported, if it did."""
        reported = len(self.outcome.steps)
        if self.waiting:
            self._say("turn")
        return self.outcome.steps[-1] if len(self.outcome.steps) > reported else None

    def finish(self) -> Outcome:
        """Grants no more turns and waits for the end. The outcome is complete, and the process is gone."""
        if self._process is not None:
            self._say(None)
            try:  # its output is closed, but it may still be ending: killed now, its own exit status would be lost
                self._process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.outcome.result = None
            self._end()
        print(f"{self.outcome.name}: {self.outcome.reason or f'{self.outcome.seconds:.0f} s'}", flush=True)
        return self.outcome

    def __enter__(self) -> "CaseProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._end()

    def _say(self, line: str | None) -> None:
        """Writes one line to the child (None closes its input) and reads events until it waits or has ended."""
        assert self._process is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it read; the exit code says of what
            print(line, file=self._process.stdin, flush=True) if line else self._process.stdin.close()
        self.waiting = False
        for text in self._process.stdout:
            event, value = json.loads(text)
            if event == "ready":
                self.waiting = True
                return
            if event == "step":
                self.outcome.steps.append(value)
            elif event == "phase":
                name, self.outcome.moments[name] = value
                self._meter.phase(name)
            else:  # "result" or "skipped"
                setattr(self.outcome, event, value)

    def _end(self) -> None:
        """Kills what is left of the process, notes its peaks, and gives a failure its reason."""
        process, outcome = self._process, self.outcome
        assert process is not None
        self._process, self.waiting = None, False
        process.kill()  # without effect on a process that has ended
        code = process.wait()
        self._meter.stop()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        outcome.peaks, outcome.data_peak_bytes = self._meter.peaks, self._meter.data_peak_bytes
        outcome.seconds = time.perf_counter() - self._started
        with self._errors as errors:
            errors.seek(0)
            if outcome.result is None and outcome.skipped is None:
                outcome.failure = _reason(code, errors.read())


@contextlib.contextmanager
def _terminated_later() -> Iterator[None]:
    """A context that SIGTERM does not interrupt: its handler runs at the end."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _reason(code: int, errors: str) -> str:
    """One line for a case that gave no result."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}" + (f": {lines[-1].strip()}" if lines else "")
