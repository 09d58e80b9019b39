"""Rungs: the same work done in several ways, each in a process of its own.

Two ways in one process would share an allocator: what the first one left behind would hide in the second one's peak.
So each rung starts from a fresh interpreter, one after the other, and its parent only listens and measures. A rung
that raises, is killed, or leaves without a result is reported with its reason; the others still run. Rungs whose times
are compared take turns instead: :mod:`benchmarks.frame.pairs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.frame.extra import require
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.process import Listener, RungProcess

__all__ = ["Outcome", "Rung", "listener", "run_rung", "run_rungs"]


def run_rungs(rungs: Iterable[Rung], *, turns: int = 0, progress: bool = True) -> list[Outcome]:
    """Runs the rungs one after the other, a progress bar for each; their outcomes in the same order."""
    tqdm = require("tqdm").tqdm
    outcomes = []
    for rung in rungs:
        with tqdm(desc=rung.name, unit="step", disable=not progress, dynamic_ncols=True) as bar:
            outcome = run_rung(rung, turns=turns, on_event=listener(bar))
            if outcome.reason:
                bar.write(f"{rung.name}: {outcome.reason}")
        outcomes.append(outcome)
    return outcomes


def listener(bar: Any) -> Listener:
    """Shows the events of a rung on a progress bar."""

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "total":
            bar.reset(event["steps"])
        elif event["event"] == "step":
            shown = {key: value for key, value in event["values"].items() if isinstance(value, float)}
            bar.set_postfix({key: f"{value:.3g}" for key, value in shown.items()}, refresh=False)
            bar.update()

    return show


def run_rung(rung: Rung, *, turns: int = 0, on_event: Listener = lambda event: None) -> Outcome:
    """Runs one rung to its end, whatever that is; the process is gone when this returns or raises.

    One that waits for its turn (``report.turns()``) gets ``turns`` of them, one straight after the other.
    """
    with RungProcess(rung, on_event) as process:
        for _ in range(turns):
            process.turn()
        return process.finish()
