"""The process of one case, from its start to its outcome; it runs on its own or waits for its turns.

A case of several ranks has a process for each, which take their turns together. Inside the context there is at most one
process a rank, and after it none, whatever was raised.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.memory import PeakMeter
from benchmarks.harness.peers import find_peer
from benchmarks.harness.ranks import torchrun_environments

PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # holds ``benchmarks``: the child imports the same code
EXIT_SECONDS = 60.0  # for an interpreter to end after its last event


def python_path() -> str:
    """``PYTHONPATH`` of a child: this project first; a child may work in another folder."""
    users = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([str(PACKAGE_ROOT), *users])


class _Rank:
    """The process of one rank, with what it wrote to standard error, and the meter of its memory."""

    def __init__(self, python: str, folder: str | Path, environment: Mapping[str, str]) -> None:
        #: A file, not a pipe: it is read at the end only, and a full pipe would stop the case.
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        #: Whether it has told its result, or why there is none.
        self.complete = False
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.harness.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=folder,
            env=dict(environment),
            text=True,
        )
        self.meter = PeakMeter(self.process.pid)

    def write(self, line: str | None) -> None:
        """Writes one line; None closes the input."""
        with contextlib.suppress(BrokenPipeError):  # it died before it read; the exit code says of what
            print(line, file=self.process.stdin, flush=True) if line else self.process.stdin.close()

    def end(self) -> str:
        """Kills what is left of the process; returns why there is no result, or nothing."""
        self.process.kill()  # without effect on a process that has ended
        code = self.process.wait()
        self.meter.stop()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        with self.errors as errors:
            errors.seek(0)
            return "" if self.complete else _reason(code, errors.read())


class CaseProcess:
    """The processes of one case, which work in ``folder``. Where its peer is not found, ``outcome`` says so.

    Of several ranks, steps, moments and result are those of rank 0, and peaks the greatest of any rank.
    """

    def __init__(self, case: Case, folder: str | Path) -> None:
        self.outcome = Outcome(case)
        self.waiting = False  #: it has built what it needs, and waits for a turn
        self._folder = folder
        self._ranks: list[_Rank] = []
        self._late = False
        self._limit = threading.Timer(case.seconds or 0.0, self._stop)

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
        users = {**case.environment, **os.environ, "PYTHONPATH": python_path()}
        with _terminated_later():  # else a process that was just started is not known yet
            for environment in torchrun_environments(case.ranks) if case.ranks > 1 else [{}]:
                self._ranks.append(_Rank(python, self._folder, {**users, **environment}))
        if case.seconds is not None:
            self._limit.start()
        self._say(json.dumps({"target": case.target, "arguments": case.arguments}))

    def turn(self) -> dict[str, Any] | None:
        """Lets the case run until it waits for its next turn, or ends; the step that it reported, if it did."""
        reported = len(self.outcome.steps)
        if self.waiting:
            self._say("turn")
        return self.outcome.steps[-1] if len(self.outcome.steps) > reported else None

    def finish(self) -> Outcome:
        """Grants no more turns and waits for the end. The outcome is complete, and the process is gone."""
        if self._ranks:
            self._say(None)
            for rank in self._ranks:
                try:  # its output is closed, but it may still be ending: killed now, its own exit status would be lost
                    rank.process.wait(EXIT_SECONDS)
                except subprocess.TimeoutExpired:
                    self.outcome.result, rank.complete = None, False
            self._end()
        print(f"{self.outcome.name}: {self.outcome.reason or f'{self.outcome.seconds:.0f} s'}", flush=True)
        return self.outcome

    def __enter__(self) -> "CaseProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranks:
            self._end()

    def _say(self, line: str | None) -> None:
        """Writes one line to each rank (None closes its input) and reads events until it waits or has ended."""
        for rank in self._ranks:
            rank.write(line)
        waiting = [self._read(rank, first=k == 0) for k, rank in enumerate(self._ranks)]
        self.waiting = all(waiting)

    def _read(self, rank: _Rank, *, first: bool) -> bool:
        """Reads events of one rank; whether it waits for a turn."""
        for text in rank.process.stdout:
            event, value = json.loads(text)
            if event == "ready":
                return True
            if event == "phase":
                name, held = value
                rank.meter.phase(name)
                if first:
                    self.outcome.moments[name] = held
            elif event == "step":
                if first:
                    self.outcome.steps.append(value)
            else:  # "result" or "skipped"
                rank.complete = value is not None
                if first or event == "skipped":
                    setattr(self.outcome, event, value)
        return False

    def _stop(self) -> None:
        """Kills the processes, and those that they have started: the time is over."""
        self._late = True
        for rank in self._ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(rank.process.pid)
                for each in (*process.children(recursive=True), process):
                    each.kill()

    def _end(self) -> None:
        """Kills what is left of the processes, notes their peaks, and gives a failure its reason."""
        self._limit.cancel()
        ranks, outcome = self._ranks, self.outcome
        self._ranks, self.waiting = [], False
        reasons = [rank.end() for rank in ranks]
        outcome.seconds = time.perf_counter() - self._started
        for rank in ranks:
            for name, held in rank.meter.peaks.items():
                outcome.peaks[name] = max(outcome.peaks.get(name, 0), held)
            outcome.data_peak_bytes = max(outcome.data_peak_bytes, rank.meter.data_peak_bytes)
        if outcome.skipped is not None:
            outcome.result = None
        elif any(reasons):
            outcome.result = None
            named = [f"rank {k}: {reason}" for k, reason in enumerate(reasons) if reason]
            outcome.failure = reasons[0] if len(ranks) == 1 else "; ".join(named)
            if self._late:
                outcome.failure = f"not done after {outcome.case.seconds:.0f} s"


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
