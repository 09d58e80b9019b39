"""``train-overlap``: how near to its slowest part training comes when a slow loader, slow rows and compute overlap.

Each case has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and of
each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, parts take their sum. torchrec's
pipeline runs over the same model, table and loader, where it is installed.
"""

from dataclasses import asdict, dataclass

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.train_overlap.methods import OURS, TORCHREC
from benchmarks.train_overlap.report import report
from benchmarks.train_overlap.workload import Shape

EVEN = "all are even"
BALANCES = {  # latency of the loader and of the rows, as shares of the compute time
    "compute is slowest": (0.5, 0.5),
    "the loader is slowest": (1.5, 0.6),
    "rows are slowest": (0.6, 1.5),
    EVEN: (1.0, 1.0),
}


@dataclass(frozen=True)
class Settings:
    """Sizes, and the number of rounds."""

    table_rows: int = option(200_000, "rows of the table")
    table_dim: int = option(64, "columns of the table")
    bags: int = option(512, "rows of the batch")
    indices: int = option(4, "rows of the table for each of them")
    width: int = option(768, "channels of the dense part")
    rounds: int = option(9, "repetitions of each case")
    batches: int = option(12, "timed batches of each method in a round")


def plan(settings: Settings, folder: str) -> Plan:
    """One group: a case for each balance, and torchrec's pipeline with an even one."""
    names = ("table_rows", "table_dim", "bags", "indices", "width")
    shape = asdict(Shape(**{name: getattr(settings, name) for name in names}))
    common = {"shape": shape, "home": folder, "rounds": settings.rounds, "batches": settings.batches}

    def case(balance: str, pipeline: str) -> Case:
        load, rows = BALANCES[balance]
        name, peer = (balance, "") if pipeline == OURS else (f"{balance}: {pipeline}", pipeline)
        arguments = {"load": load, "rows": rows, "pipeline": pipeline, **common}
        return Case(name, "benchmarks.train_overlap.methods:measure", arguments, peer=peer)

    yield Group("balances", [*(case(balance, OURS) for balance in BALANCES), case(EVEN, TORCHREC)])


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"threads": 1})
