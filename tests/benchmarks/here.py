"""Rungs run in the test's own process: the parts of a question without the seconds of its interpreters."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.frame.child import Report
from benchmarks.frame.limits import Limits
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import Paired

__all__ = ["RATES", "apart_here", "in_turn_here", "pairs_here", "run_here"]

RATES = Limits(  # of no machine
    threads=1,
    device="cpu",
    dtype="float32",
    matmul_flops=1e9,
    copy_bytes=1e9,
    disk_read_bytes=1e6,
    disk_read_buffered_bytes=1e6,
    disk_write_bytes=1e6,
    direct=True,
)


class Recorder(Report):
    """A report that fills an outcome, and gives as many turns as it was told."""

    def __init__(self, outcome: Outcome, turns: int) -> None:
        self.outcome = outcome
        self._turns = turns

    def turns(self) -> Iterator[int]:
        return iter(range(self._turns))

    def event(self, event: str, **values: Any) -> None:
        if event == "step":
            self.outcome.steps.append(values["values"])
        elif event == "skip":
            self.outcome.skipped = values["reason"]
        elif event == "phase":
            self.outcome.peaks[values["name"]] = max(self.outcome.moments.values(), default=0)
        elif event == "memory":
            self.outcome.moments[values["moment"]] = values["bytes"]
            self.outcome.peaks["steps"] = max(self.outcome.peaks.get("steps", 0), values["bytes"])


def run_here(rungs: Iterable[Rung], turns: int = 0) -> list[Outcome]:
    outcomes = [Outcome(rung) for rung in rungs]
    for outcome in outcomes:
        module, _, function = outcome.rung.target.partition(":")
        if outcome.rung.peer:
            outcome.skipped = "peers are for processes"
            continue
        run = getattr(importlib.import_module(module), function)
        result = run(Recorder(outcome, turns), **outcome.rung.arguments)
        outcome.result = None if outcome.skipped else result
    return outcomes


def in_turn_here(rungs: Iterable[Rung], turns: int, *, warmup: int = 0) -> list[Outcome]:
    outcomes = run_here(rungs, turns=warmup + turns)
    for outcome in outcomes:
        del outcome.steps[:warmup]
    return outcomes


def apart_here(rungs: Iterable[Rung], rounds: int, *, turns: int, warmup: int) -> list[Outcome]:
    return in_turn_here(rungs, rounds * turns, warmup=warmup)


def pairs_here(reference: Rung, rungs: Iterable[Rung], pairs: int) -> tuple[Outcome, list[Paired]]:
    first, *others = run_here([reference, *rungs], turns=pairs + 1)
    return first, [Paired(other, other.steps[1:], first.steps[1:] if other.steps else []) for other in others]
