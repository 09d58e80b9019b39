"""The case that counts what the host does in a step of tiny blocks, by all methods in turn in one process."""

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.worker import Reporter
from offload import OffloadModel, OffloadOptimizer

WIDTH, ROWS = 16, 4
#: Steps before a count: plans are made, and what must be learnt is known.
WARM_UP, PROFILED = 14, 3

Step = Callable[[], object]


def layers(blocks: int) -> nn.Sequential:
    """Tiny blocks: their kernels take little beside what the host does."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks))
    )


def steps_of(blocks: int, folder: Path) -> dict[str, Step]:
    """A step of each method: forward and backward, and where the name says so the optimizer's."""
    x = torch.randn(ROWS, WIDTH)
    plain, checkpointed = layers(blocks), layers(blocks)

    def run_checkpointed() -> None:
        value: Tensor = x
        for layer in checkpointed:
            value = checkpoint(layer, value, use_reentrant=False)
        value.mean().backward()

    def ours(home: Path | str, *, recompute: bool, microbatches: int = 1) -> OffloadModel:
        return OffloadModel(layers(blocks), "cpu", home, blocks, recompute, microbatches)

    def passes(model: nn.Module) -> Step:
        return lambda: model(x).mean().backward()

    updated = ours(folder / "updated", recompute=True)
    optimizer = OffloadOptimizer(updated, torch.optim.AdamW)

    def run_updated() -> None:
        updated(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "plain torch": passes(plain),
        "torch.utils.checkpoint": run_checkpointed,
        "ours, recomputed, memory": passes(ours("cpu", recompute=True)),
        "ours, recomputed, memory, 4 micro-batches": passes(ours("cpu", recompute=True, microbatches=4)),
        "ours, recomputed, files": passes(ours(folder / "files", recompute=True)),
        "ours, kept, memory": passes(ours("cpu", recompute=False)),
        "ours, files, OffloadOptimizer": run_updated,
    }


def calls_in(step: Step) -> float:
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
    steps = steps_of(blocks, Path(folder))
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    calls = {name: calls_in(step) / blocks for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {"calls": calls, "processor": {name: statistics.median(each) for name, each in seconds.items()}}
