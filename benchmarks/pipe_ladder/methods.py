"""The pipes: ours, with each of its schedules, torchgpipe's and fairscale's; each is timed and its peak taken.

All pipes get the same layers, the same mini-batch and the same number of micro-batches. What differs is what a pipe
adds to the layers, and what it keeps in memory.
"""

import gc
import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.settings import option
from benchmarks.harness.worker import Reporter
from pipe import Pipe

STAGES = 2
WARMUP = 2  # steps of each method: pages, threads and the first growth of the heap


@dataclass(frozen=True)
class Settings:
    """Sizes, and how often to measure."""

    dim: int = option(384, "channels")
    blocks: int = option(4, "blocks of four layers", least=2)
    rows: int = option(1024, "rows of the mini-batch")
    chunks: tuple[int, ...] = option((1, 2, 4, 8, 16), "numbers of micro-batches")
    rounds: int = option(7, "steps of each pipe")
    threads: int = option(1, "threads of torch's kernels")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: more micro-batches than rows."""
        wrong = max(self.chunks) > self.rows
        return f"expected from 1 to {self.rows} micro-batches, got chunks={self.chunks}" if wrong else ""

    def model(self) -> nn.Sequential:
        """``blocks`` of four layers each: wide linear layers, between which activations are four times a boundary."""
        torch.manual_seed(0)
        torch.set_num_threads(self.threads)
        layers: list[nn.Module] = []
        for _ in range(self.blocks):
            layers += [nn.Linear(self.dim, 4 * self.dim), nn.GELU(), nn.Linear(4 * self.dim, self.dim)]
            layers.append(nn.LayerNorm(self.dim))
        return nn.Sequential(*layers)

    def batch(self) -> Tensor:
        """The mini-batch; it needs no gradient."""
        return torch.randn(self.rows, self.dim, generator=torch.Generator().manual_seed(1))

    @property
    def balance(self) -> list[int]:
        """Layers of each stage."""
        first = 4 * (self.blocks // STAGES)
        return [first, 4 * self.blocks - first]


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


Steps = Callable[[Tensor], object]


def _through_autograd(pipe: nn.Module) -> Steps:
    return lambda x: _loss(pipe(x)).backward()


def _ours(settings: Settings, chunks: int, checkpoint: str = "except_last") -> Pipe:
    return Pipe(settings.model(), settings.balance, ["cpu"] * STAGES, chunks=chunks, checkpoint=checkpoint)


def _ancestor(settings: Settings, chunks: int, module: str, name: str) -> Steps:
    pipe = getattr(importlib.import_module(module), name)
    return _through_autograd(pipe(settings.model(), settings.balance, devices=["cpu"] * STAGES, chunks=chunks))


def _scheduled(settings: Settings, chunks: int, name: str, checkpoint: str = "except_last") -> Steps:
    pipe = _ours(settings, chunks, checkpoint)
    return lambda x: pipe.train_step(x, None, lambda output, target: _loss(output), schedule=name, reduction="mean")


METHODS: dict[str, Callable[[Settings, int], Steps]] = {
    "ours": lambda settings, chunks: _through_autograd(_ours(settings, chunks)),
    "torchgpipe": partial(_ancestor, module="torchgpipe", name="GPipe"),
    "fairscale": partial(_ancestor, module="fairscale.nn", name="Pipe"),
    "ours, 1F1B": partial(_scheduled, name="1f1b"),
    "ours, 1F1B, nothing recomputed": partial(_scheduled, name="1f1b", checkpoint="never"),
    "ours, nothing recomputed": lambda settings, chunks: _through_autograd(_ours(settings, chunks, "never")),
}
"""By name, what makes a step from settings and a number of micro-batches."""


def time_rounds(
    report: Reporter, settings: dict[str, Any], chunks: int, names: list[str], repeats: int
) -> dict[str, Any]:
    """Steps of all methods in turn, in one process; which one starts changes from round to round.

    Each round reports for each method the seconds of one step by the clock and of processor time, the mean of
    ``repeats`` in a row. On a machine that others use as well, only the second says what a method costs.
    """
    warnings.simplefilter("ignore")  # the ancestors were written for older versions of torch
    sizes = Settings(**settings)
    x = sizes.batch()
    steps = {name: METHODS[name](sizes, chunks) for name in names}
    for _ in range(WARMUP):
        for step in steps.values():
            step(x)
    gc.collect()
    for k in range(sizes.rounds):
        taken: dict[str, float] = {}
        begin = k % len(names)
        for name in names[begin:] + names[:begin]:
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                steps[name](x)
            taken[f"{name}: processor"] = (time.process_time() - processor) / repeats
            taken[f"{name}: clock"] = (time.perf_counter() - clock) / repeats
        report.step(**taken)
    return {"chunks": chunks}


def peak(report: Reporter, settings: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    """Steps of one method, and their peak memory above the model: the kernel's high-water mark."""
    warnings.simplefilter("ignore")
    sizes = Settings(**settings)
    x, chunks = sizes.batch(), max(sizes.chunks)
    step = METHODS[name](sizes, chunks)
    step(x[:STAGES])  # makes gradients, loads libraries
    gc.collect()
    report.phase("steps")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the mark starts from here
    before = _status_bytes("VmRSS")
    for _ in range(steps):
        began = time.perf_counter()
        step(x)
        report.step(seconds=time.perf_counter() - began)
    return {"chunks": chunks, "above_model": _status_bytes("VmHWM") - before}


def _status_bytes(name: str) -> int:
    """A figure of this process, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
