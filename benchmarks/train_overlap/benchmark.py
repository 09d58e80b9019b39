"""``train-overlap``: how near to its slowest part training comes when a slow loader, slow rows and compute overlap.

Each case has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and of
each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, parts take their sum. torchrec's
pipeline runs over the same model, table and loader, where it is installed.
"""

from dataclasses import asdict
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case
from benchmarks.harness.table import at_most, case_table, spread
from benchmarks.train_overlap.methods import IN_TURN, OURS, PARTS, PIPELINED, TORCHREC, Settings

MAXIMUM_RATIO = 1.10  # of the overlapped step to the slowest part alone
EVEN = "all are even"
BALANCES = {  # latency of the loader and of the rows, as shares of the compute time
    "compute is slowest": (0.5, 0.5),
    "the loader is slowest": (1.5, 0.6),
    "rows are slowest": (0.6, 1.5),
    EVEN: (1.0, 1.0),
}


def measure(run: Run) -> None:
    """A case for each balance, and torchrec's pipeline with an even one."""

    def case(balance: str, pipeline: str) -> Case:
        load, rows = BALANCES[balance]
        name, peer = (balance, "") if pipeline == OURS else (f"{balance}: {pipeline}", pipeline)
        how = {"settings": asdict(run.settings), "load": load, "rows": rows, "pipeline": pipeline}
        return Case(name, "benchmarks.train_overlap.methods:measure", how, peer=peer)

    run.group("balances", [*(case(balance, OURS) for balance in BALANCES), case(EVEN, TORCHREC)])


def report(run: Run) -> list[str]:
    """One table."""

    def milliseconds(name: str) -> Any:
        return lambda outcome: f"{1e3 * outcome.median(name):.1f} ms"

    columns = {
        **{f"{part} alone": milliseconds(part) for part in PARTS},
        IN_TURN: milliseconds(IN_TURN),
        PIPELINED: milliseconds(PIPELINED),
        "pipelined / slowest": lambda o: spread(o.ratios()),
        "read again": lambda o: f"{o.result['rows_refreshed'] / o.result['rows_read']:.1%}",
    }
    return [case_table(run.outcomes, columns)]


def bounds(run: Run) -> list[str]:
    """Rows run ahead, and an overlapped step is hardly longer than its slowest part; peers have no bounds."""
    broken = []
    for outcome in run.outcomes:
        if outcome.case.peer:
            continue
        if outcome.result["undistributed"]:
            broken.append(f"{outcome.name}: rows did not run ahead: {outcome.result['undistributed']}")
        what = f"{outcome.name}: pipelined / slowest"
        broken += at_most(what, outcome.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """The overlapped step beside its slowest part, a ratio for each balance."""
    ratios = [outcome.ratio() for outcome in run.outcomes if not outcome.case.peer]
    return [
        Claim(
            "train pipeline with a slow loader and slow embedding rows, four balances", "its slowest part alone", ratios
        )
    ]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
