"""Rungs: the same work done in several ways, each in a process of its own.

Two ways in one process would share an allocator: what the first one left behind would hide in the second one's peak.
So each rung starts from a fresh interpreter, one after the other, and its parent only listens and measures. A rung
that raises, is killed, or leaves without a result is reported with its reason; the others still run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.frame.extra import require
from benchmarks.frame.memory import PeakMeter

__all__ = ["Outcome", "Rung", "run_rung", "run_rungs"]

PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # holds ``benchmarks``: the child imports the same code
EXIT_SECONDS = 60.0  # for an interpreter to leave after its last event


@dataclass(frozen=True)
class Rung:
    """One way: a name for the table, ``package.module:function``, and the function's arguments (JSON).

    ``environment`` is set in the rung's process, where the user has not set it.
    """

    name: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a rung.

    ``failure`` is None exactly when ``result`` is what the function returned. ``steps`` holds what each step reported,
    ``moments`` what the process held (bytes) at the moments that it named, ``peaks`` the most it held in each phase.
    """

    rung: Rung
    result: dict[str, Any] | None = None
    failure: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The most memory that the rung's process held at any time."""
        return max(self.peaks.values(), default=0)

    def as_json(self) -> dict[str, Any]:
        """A JSON object: one line of the file that ``--json`` names."""
        fields = asdict(self)
        return {"rung": fields.pop("rung")["name"], "peak_bytes": self.peak_bytes, **fields}


def run_rungs(rungs: Iterable[Rung], *, progress: bool = True) -> list[Outcome]:
    """Runs the rungs one after the other, a progress bar for each; their outcomes in the same order."""
    tqdm = require("tqdm").tqdm
    outcomes = []
    for rung in rungs:
        with tqdm(desc=rung.name, unit="step", disable=not progress, dynamic_ncols=True) as bar:

            def show(event: dict[str, Any], bar: Any = bar) -> None:
                if event["event"] == "total":
                    bar.reset(event["steps"])
                elif event["event"] == "step":
                    shown = {key: value for key, value in event["values"].items() if isinstance(value, float)}
                    bar.set_postfix({key: f"{value:.3g}" for key, value in shown.items()}, refresh=False)
                    bar.update()

            outcome = run_rung(rung, on_event=show)
            if outcome.failure is not None:
                bar.write(f"{rung.name}: {outcome.failure}")
        outcomes.append(outcome)
    return outcomes


def run_rung(rung: Rung, *, on_event: Callable[[dict[str, Any]], None] = lambda event: None) -> Outcome:
    """Runs one rung to its end, whatever that is; the process is gone when this returns or raises."""
    outcome = Outcome(rung)
    search = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.frame.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A file, not a pipe: nobody reads it while the rung runs, and a full pipe would stop the rung.
            stderr=errors,
            env={**rung.environment, **os.environ, "PYTHONPATH": search},
            encoding="utf-8",
        )
        try:
            with PeakMeter(process.pid) as meter:
                _listen(process, outcome, meter, on_event)
                # Its output is closed but it may still be leaving: killed now, its own exit status would be lost.
                code = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            outcome.result, code = None, -signal.SIGKILL
        finally:
            process.kill()  # without effect on a process that has ended
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        outcome.peaks = meter.peaks
        outcome.seconds = time.perf_counter() - started
        if outcome.result is None:
            errors.seek(0)
            outcome.failure = _reason(code, errors.read())
    return outcome


def _listen(
    process: subprocess.Popen[str], outcome: Outcome, meter: PeakMeter, on_event: Callable[[dict[str, Any]], None]
) -> None:
    """Sends the order and takes in events until the child closes its output."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin as order:
            json.dump({"target": outcome.rung.target, "arguments": outcome.rung.arguments}, order)
    except BrokenPipeError:
        pass  # it died before it read; the exit code says of what
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "step":
            outcome.steps.append(event["values"])
        elif event["event"] == "phase":
            meter.phase(event["name"])
        elif event["event"] == "memory":
            outcome.moments[event["moment"]] = event["bytes"]
        elif event["event"] == "result":
            outcome.result = event["values"]
        on_event(event)


def _reason(code: int, errors: str) -> str:
    """One line for a rung that gave no result."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"exit status {code}" + (f": {lines[-1].strip()}" if lines else "")
