"""``train-overlap``: how near to its slowest part training comes when a slow loader, slow rows and compute overlap.

Each case has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and of
each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, parts take their sum. torchrec's
pipeline runs over the same model, table and loader, where it is installed.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan, Report, Run
from benchmarks.harness.case import Case, Outcome, failures
from benchmarks.harness.limits import Limits
from benchmarks.harness.schedule import Group
from benchmarks.harness.table import at_most, case_table, limit_columns, reasons, spread
from benchmarks.train_overlap.methods import IN_TURN, OURS, PIPELINED, TORCHREC, Settings

MAXIMUM_RATIO = 1.10  # of the overlapped step to the slowest part alone
PARTS = ("load", "rows", "compute")
LIMIT = (
    "The limit of a step is the longest of the two latencies, which no machine shortens, of the matrix products on one "
    "thread, and of the copies of the rows that it reads."
)
EVEN = "all are even"
BALANCES = {  # latency of the loader and of the rows, as shares of the compute time
    "compute is slowest": (0.5, 0.5),
    "the loader is slowest": (1.5, 0.6),
    "rows are slowest": (0.6, 1.5),
    EVEN: (1.0, 1.0),
}


def plan(settings: Settings, folder: str) -> Plan:
    """One group: a case for each balance, and torchrec's pipeline with an even one."""

    def case(balance: str, pipeline: str) -> Case:
        load, rows = BALANCES[balance]
        name, peer = (balance, "") if pipeline == OURS else (f"{balance}: {pipeline}", pipeline)
        arguments = {"settings": asdict(settings), "home": folder, "load": load, "rows": rows, "pipeline": pipeline}
        return Case(name, "benchmarks.train_overlap.methods:measure", arguments, peer=peer)

    yield Group("balances", [*(case(balance, OURS) for balance in BALANCES), case(EVEN, TORCHREC)])


def report(run: Run[Any]) -> Report:
    """One table."""
    outcomes = run.outcomes

    def milliseconds(name: str) -> Any:
        return lambda outcome: f"{1e3 * outcome.median(name):.1f} ms"

    columns = {
        **{f"{part} alone": milliseconds(part) for part in PARTS},
        IN_TURN: milliseconds(IN_TURN),
        PIPELINED: milliseconds(PIPELINED),
        "pipelined / slowest": lambda o: spread(o.ratios()),
        **limit_columns(run.limits, lambda o: limit_seconds(o, run.limits), lambda o: o.median(PIPELINED)),
        "read again": lambda o: f"{o.done['rows_refreshed'] / o.done['rows_read']:.1%}",
    }
    shown = [outcome for outcome in outcomes if outcome.result is not None]
    ratios = {f"{outcome.name}: pipelined / slowest": outcome.ratio() for outcome in shown}
    sections = [case_table(outcomes, columns), reasons(outcomes), LIMIT]
    return Report(sections, broken_bounds(outcomes), ratios=ratios)


def limit_seconds(outcome: Outcome, limits: Limits) -> float:
    """The least seconds of a step in which everything overlaps that can."""
    settings = Settings(**outcome.case.arguments["settings"])
    work = limits.step_seconds(flops=settings.training_flops, copied_bytes=outcome.done["bytes_of_rows"])
    return float(max(work, *outcome.done["latencies"]))


def broken_bounds(outcomes: Sequence[Outcome]) -> list[str]:
    """Bounds that do not hold, one line each; peers have none."""
    broken = failures(outcomes)
    for outcome in outcomes:
        if outcome.result is None or outcome.case.peer:
            continue
        if outcome.result["undistributed"]:
            broken.append(f"{outcome.name}: rows did not run ahead: {outcome.result['undistributed']}")
        what = f"{outcome.name}: pipelined / slowest"
        broken += at_most(what, outcome.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    return broken


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"threads": 1})
