"""``train-overlap``: how near to its slowest part training comes when a slow loader, slow rows and compute overlap.

Each case has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and of
each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, parts take their sum. torchrec's
pipeline runs over the same model, table and loader, where it is installed.
"""

from dataclasses import asdict

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.train_overlap.methods import OURS, TORCHREC
from benchmarks.train_overlap.report import report
from benchmarks.train_overlap.workload import Settings

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


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"threads": 1})
