"""Runs benchmarks in the test's own process: every part of them without the seconds of their interpreters."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.__main__ import load, main
from benchmarks.harness import benchmark as harness
from benchmarks.harness.benchmark import read_header, read_run
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.worker import Reporter


class Recorder(Reporter):
    """A reporter that fills an outcome and grants a number of turns."""

    def __init__(self, outcome: Outcome, turns: int) -> None:
        self.outcome = outcome
        self._turns = turns

    def turns(self) -> Iterator[int]:
        return iter(range(self._turns))

    def event(self, event: str, value: Any = None) -> None:
        if event == "step":
            self.outcome.steps.append(value)
        elif event == "phase":
            name, held = value
            self.outcome.moments[name] = held
            self.outcome.peaks[name] = held + 1


def run_case(case: Case, folder: str | Path, turns: int = 0) -> Outcome:
    """The outcome of a case without a process; peers are skipped."""
    found = Outcome(case)
    if case.peer or case.ranks > 1:
        found.skipped = "peers need a process" if case.peer else "ranks need processes"
        return found
    module, _, function = case.target.partition(":")
    with contextlib.chdir(folder):
        try:
            found.result = getattr(importlib.import_module(module), function)(Recorder(found, turns), **case.arguments)
        except CannotRunError as reason:
            found.skipped = str(reason)
        except Exception as error:
            found.failure = f"exit status 1: {type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():  # which ends with the process of a case
                dist.destroy_process_group()
    return found


def run_group_here(
    cases: Sequence[Case], folder: str | Path, order: str = "alone", turns: int = 0, warmup: int = 0, done: Any = None
) -> list[Outcome]:
    outcomes = [run_case(case, folder, warmup + turns) for case in cases]
    for found in outcomes:
        del found.steps[:warmup]
    for found in outcomes if order != "alone" else ():
        found.reference = [
            {key: step[key] for key in ("seconds", "processor") if key in step} for step in outcomes[0].steps
        ]
    return outcomes


def run_here(name: str, words: str, out: str | None = None) -> int:
    """``python -m benchmarks NAME WORDS`` in this process; the exit status."""
    run_group, harness.run_group = harness.run_group, run_group_here
    try:
        return main([name, *words.split(), *(["--out", out] if out else [])])
    finally:
        harness.run_group = run_group


def outcomes_of(stem: str) -> dict[str, list[Outcome]]:
    """The outcomes of each group, read from the results file that a benchmark wrote."""
    path = Path(f"{stem}.jsonl")
    return read_run(path, load(read_header(path)["benchmark"])).groups


def outcome(
    name: str, result: Mapping[str, Any] | None = None, *, arguments: Mapping[str, Any] | None = None, **values: Any
) -> Outcome:
    """An outcome of a case that never ran."""
    case = {key: values.pop(key) for key in ("peer", "may_lack_memory", "ranks") if key in values}
    return Outcome(Case(name, "m:f", arguments or {}, **case), None if result is None else dict(result), **values)
