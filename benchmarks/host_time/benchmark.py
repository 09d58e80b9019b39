"""``host-time``: Python calls and processor time of a step of tiny blocks, beside ``torch.utils.checkpoint``."""

from dataclasses import dataclass

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most

CASE = "benchmarks.host_time.methods:count"
NAME = "all methods in turn"
CHECKPOINT = "torch.utils.checkpoint"
#: Calls to those of the checkpoint, a micro-batch.
MOST_CALLS = {
    "ours, recomputed, memory": 1.35,
    "ours, recomputed, memory, 4 micro-batches": 1.35,
    "ours, recomputed, files": 1.6,
    "ours, files, OffloadOptimizer": 2.2,
}
WORDS = (
    "Calls are counted by cProfile in the caller's thread, for a block, or for a block and micro-batch; no load of the "
    "machine changes them. Processor time is that of all threads of the process, the median of steps in turn."
)


@dataclass(frozen=True)
class Settings:
    """The model, and how often its steps are timed."""

    blocks: int = option(16, "blocks of Linear, GELU, Linear", least=2)
    turns: int = option(30, "steps of each method whose processor time is taken")


def measure(run: Run) -> None:
    """One process."""
    settings = run.settings
    arguments = {"blocks": settings.blocks, "turns": settings.turns, "folder": str(run.folder)}
    run.group(NAME, [Case(NAME, CASE, arguments)])


def _ratios(run: Run) -> dict[str, tuple[float, float, float]]:
    """By method: calls a block and micro-batch, these to the checkpoint's, and processor time to the checkpoint's."""
    outcome = run.find(NAME)
    if outcome is None:
        return {}
    calls, processor = outcome.result["calls"], outcome.result["processor"]
    each = {name: count / (4 if name.endswith("4 micro-batches") else 1) for name, count in calls.items()}
    return {
        name: (each[name], each[name] / each[CHECKPOINT], processor[name] / processor[CHECKPOINT]) for name in calls
    }


def report(run: Run) -> list[str]:
    """A table."""
    rows = [
        f"| {name} | {calls:,.0f} | {ratio:.2f} | {seconds:.2f} |"
        for name, (calls, ratio, seconds) in _ratios(run).items()
    ]
    head = "| method | calls a block | to checkpoint | processor time to checkpoint |\n|---|---:|---:|---:|"
    return ["\n".join([head, *rows]), WORDS]


def bounds(run: Run) -> list[str]:
    """Calls; processor time is told, not bounded."""
    ratios = _ratios(run)
    broken: list[str] = []
    for name, most in MOST_CALLS.items():
        broken += at_most(f"{name}: calls to those of the checkpoint", ratios[name][1], most, "{:.2f}".format)
    return broken


BENCHMARK = Benchmark(Settings, measure, report, bounds)
