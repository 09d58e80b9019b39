"""Runs benchmarks in the test's own process: every part of them without the seconds of their interpreters."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from benchmarks.__main__ import find
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.limits import Limits
from benchmarks.harness.report import add_arguments, run_benchmark
from benchmarks.harness.schedule import Group, refer_to_first
from benchmarks.harness.worker import Reporter

__all__ = ["RATES", "Recorder", "lines_of", "outcome", "run_case", "run_here"]

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


class Recorder(Reporter):
    """A reporter that fills an outcome and grants a number of turns."""

    def __init__(self, outcome: Outcome, turns: int) -> None:
        self.outcome = outcome
        self._turns = turns

    def turns(self) -> Iterator[int]:
        return iter(range(self._turns))

    def event(self, event: str, **values: Any) -> None:
        if event == "step":
            self.outcome.steps.append(values["values"])
        elif event == "phase":
            self.outcome.peaks[values["name"]] = 1 + max(self.outcome.moments.values(), default=0)
        elif event == "memory":
            self.outcome.moments[values["moment"]] = values["bytes"]


def run_case(case: Case, turns: int = 0) -> Outcome:
    """The outcome of a case without a process; peers are skipped."""
    found = Outcome(case)
    if case.peer:
        found.skipped = "peers need a process"
        return found
    module, _, function = case.target.partition(":")
    try:
        found.result = getattr(importlib.import_module(module), function)(Recorder(found, turns), **case.arguments)
    except CannotRunError as reason:
        found.skipped = str(reason)
    return found


def run_group_here(group: Group) -> list[Outcome]:
    outcomes = [run_case(case, group.warmup + group.turns) for case in group.cases]
    for found in outcomes:
        del found.steps[: group.warmup]
    if group.order != "alone":
        refer_to_first(outcomes)
    return outcomes


def run_here(name: str, words: str, out: Path | None = None) -> int:
    """``python -m benchmarks NAME WORDS`` in this process; the exit status."""
    benchmark: Benchmark[Any] = dataclasses.replace(find(name).load(), run_group=run_group_here)
    parser = argparse.ArgumentParser()
    add_arguments(parser, benchmark)
    arguments = parser.parse_args([*words.split(), *(["--out", str(out)] if out else [])])
    return run_benchmark(name, find(name).summary, benchmark, arguments)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a results file without its header."""
    return cast("list[dict[str, Any]]", [json.loads(line) for line in path.read_text().splitlines()[1:]])


def outcome(
    name: str, result: Mapping[str, Any] | None = None, *, arguments: Mapping[str, Any] | None = None, **values: Any
) -> Outcome:
    """An outcome of a case that never ran."""
    peer = values.pop("peer", "")
    return Outcome(Case(name, "m:f", arguments or {}, peer=peer), None if result is None else dict(result), **values)
