"""``host-time``: Python calls and processor time of a step of tiny blocks, beside ``torch.utils.checkpoint``."""

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most
from benchmarks.harness.worker import Reporter
from offload import OffloadModel, OffloadOptimizer

NAME, CHECKPOINT = "all methods in turn", "torch.utils.checkpoint"
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
WIDTH, ROWS = 16, 4
#: Steps before a count: plans are made, and what must be learnt is known.
WARM_UP, PROFILED = 14, 3


@dataclass(frozen=True)
class Settings:
    """The model, and how often its steps are timed."""

    blocks: int = option(16, "blocks of Linear, GELU, Linear", least=2)
    turns: int = option(30, "steps of each method whose processor time is taken")


def layers(blocks: int) -> nn.Sequential:
    """Tiny blocks: their kernels take little beside what the host does."""
    torch.manual_seed(0)
    each = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks))
    return nn.Sequential(*each)


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    """Its output, of which each block is recomputed by torch."""
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def calls_in(step: Callable[[], object]) -> float:
    """Python calls of the caller's thread in a step."""
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of others would count
    try:
        profile.enable()
        for _ in range(PROFILED):
            step()
        profile.disable()
    finally:
        gc.enable()
    counted: Any = pstats.Stats(profile)
    return float(counted.total_calls) / PROFILED


def count(report: Reporter, blocks: int, turns: int, folder: str) -> dict[str, Any]:
    """Calls a block, and the processor time of the whole process, of a step of each method."""
    torch.set_num_threads(1)
    x, plain = torch.randn(ROWS, WIDTH), layers(blocks)

    def ours(home: str, *, recompute: bool, microbatches: int = 1) -> Callable[[Tensor], Tensor]:
        place = home if home == "cpu" else Path(folder, home)
        return OffloadModel(layers(blocks), "cpu", place, blocks, recompute, microbatches)

    updated: Any = ours("updated", recompute=True)
    optimizer = OffloadOptimizer(updated, torch.optim.AdamW)
    methods: dict[str, Callable[[Tensor], Tensor]] = {
        "plain torch": plain,
        CHECKPOINT: lambda value: checkpointed(plain, value),
        "ours, recomputed, memory": ours("cpu", recompute=True),
        "ours, recomputed, memory, 4 micro-batches": ours("cpu", recompute=True, microbatches=4),
        "ours, recomputed, files": ours("files", recompute=True),
        "ours, kept, memory": ours("cpu", recompute=False),
        "ours, files, OffloadOptimizer": updated,
    }

    def run(method: Callable[[Tensor], Tensor]) -> None:
        method(x).mean().backward()
        if method is updated:
            optimizer.step()
            optimizer.zero_grad()

    for method in methods.values():
        for _ in range(WARM_UP):
            run(method)
    calls = {name: calls_in(lambda method=method: run(method)) / blocks for name, method in methods.items()}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(turns):
        for name, method in methods.items():
            began = time.process_time()
            run(method)
            seconds[name].append(time.process_time() - began)
    return {"calls": calls, "processor": {name: statistics.median(each) for name, each in seconds.items()}}


def measure(run: Run) -> None:
    """One process."""
    arguments = {"blocks": run.settings.blocks, "turns": run.settings.turns, "folder": str(run.folder)}
    run.group(NAME, [Case(NAME, "benchmarks.host_time:count", arguments)])


def _ratios(run: Run) -> dict[str, tuple[float, float, float]]:
    """By method: calls a block and micro-batch, these to the checkpoint's, and processor time to the checkpoint's."""
    outcome = run.find(NAME)
    if outcome is None:
        return {}
    calls, processor = outcome.result["calls"], outcome.result["processor"]
    each = {name: count / (4 if name.endswith("4 micro-batches") else 1) for name, count in calls.items()}
    return {n: (each[n], each[n] / each[CHECKPOINT], processor[n] / processor[CHECKPOINT]) for n in calls}


def report(run: Run) -> list[str]:
    """A table."""
    rows = [
        f"| {n} | {calls:,.0f} | {ratio:.2f} | {seconds:.2f} |" for n, (calls, ratio, seconds) in _ratios(run).items()
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
