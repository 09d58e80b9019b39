"""The pipes: ours, torchgpipe's, fairscale's, and ours with one mechanism taken away; each is timed and its peak taken.

All pipes get the same layers, the same mini-batch and the same number of micro-batches. What differs is what a pipe
adds to the layers, and what it keeps in memory. Only to measure the bubble each stage gets its own worker.
"""

import contextlib
import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness.settings import option
from benchmarks.harness.worker import Reporter
from pipe import Pipe, worker
from pipe import pipeline as running
from pipe.checkpoint import Checkpointing
from pipe.schedule import Schedule, StageAction, fill_drain, one_forward_one_backward, simulate
from pipe.step import PipelineStep

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
    def parameters(self) -> int:
        """Elements of all parameters: in each block two matrices, their biases, a norm."""
        return self.blocks * (8 * self.dim**2 + 7 * self.dim)

    @property
    def training_flops(self) -> float:
        """Operations of a forward and a backward, nothing recomputed; the batch needs no gradient."""
        return 2.0 * self.rows * (3 * 8 * self.dim**2 * self.blocks - 4 * self.dim**2)

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


ABLATIONS: dict[str, tuple[Any, str, Any]] = {  # what is replaced by a function that returns a constant
    "in a worker thread": (worker, "needs_threads", True),  # as if the stages were on two devices
    "no order": (running, "_fork", None),  # no micro-batch depends on another in backward
    "no early recompute": (Checkpointing, "recompute", None),  # a cell is recomputed when its gradient has arrived
}


def _ablated(settings: Settings, chunks: int, names: tuple[str, ...]) -> Steps:
    step = _through_autograd(_ours(settings, chunks))

    def run(x: Tensor) -> None:
        with contextlib.ExitStack() as stack:
            for target, attribute, value in (ABLATIONS[name] for name in names):
                stack.enter_context(mock.patch.object(target, attribute, return_value=value))
            step(x)

    return run


METHODS: dict[str, Callable[[Settings, int], Steps]] = {
    "ours": lambda settings, chunks: _through_autograd(_ours(settings, chunks)),
    "torchgpipe": partial(_ancestor, module="torchgpipe", name="GPipe"),
    "fairscale": partial(_ancestor, module="fairscale.nn", name="Pipe"),
    "ours, 1F1B": partial(_scheduled, name="1f1b"),
    "ours, 1F1B, nothing recomputed": partial(_scheduled, name="1f1b", checkpoint="never"),
    "ours, nothing recomputed": lambda settings, chunks: _through_autograd(_ours(settings, chunks, "never")),
    "ours, in a worker thread": partial(_ablated, names=("in a worker thread",)),
    "ours, in a worker thread, no order": partial(_ablated, names=("in a worker thread", "no order")),
    "ours, no order": partial(_ablated, names=("no order",)),
    "ours, no early recompute": partial(_ablated, names=("no early recompute",)),
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


Spans = list[tuple[StageAction, float, float]]


@contextlib.contextmanager
def _spans() -> Iterator[Spans]:
    """Yields when each action of a step began and ended."""
    spans: Spans = []
    act = PipelineStep._act

    def timed(self: PipelineStep, action: StageAction) -> Any:
        began = time.perf_counter()
        try:
            return act(self, action)
        finally:
            spans.append((action, began, time.perf_counter()))

    with mock.patch.object(PipelineStep, "_act", timed):
        yield spans


@contextlib.contextmanager
def _a_processor_each(pipe: Pipe) -> Iterator[Spans]:
    """:func:`_spans` where each stage of ``pipe`` has its own worker."""
    with contextlib.ExitStack() as stack:
        for j, stage in enumerate(pipe._stages):
            # For torch all of them are the CPU, for the workers they are different devices.
            stack.enter_context(mock.patch.object(stage, "device", torch.device("cpu", j)))
        stack.enter_context(mock.patch.object(worker, "normalize_device", side_effect=lambda device: device))
        yield stack.enter_context(_spans())


def bubbles(report: Reporter, settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The share of their time in which two stages wait, for each schedule: measured and simulated.

    Measured with a worker for each stage; the machine needs a processor for each. Simulated from the times of the cells
    when they run one after another, which contain no waits.
    """
    sizes = Settings(**settings)
    x = sizes.batch()
    for count in sizes.chunks:
        pipe = _ours(sizes, count)
        values: dict[str, float] = {}
        for name, make in (("fill-drain", fill_drain), ("1F1B", one_forward_one_backward)):
            schedule = make(count, STAGES)

            def step(pipe: Pipe = pipe, schedule: Schedule = schedule) -> float:
                began = time.perf_counter()
                pipe.train_step(x, None, lambda output, target: _loss(output), schedule=schedule, reduction="mean")
                return time.perf_counter() - began

            cells: dict[StageAction, list[float]] = {}
            alone, together, waits = list[float](), list[float](), list[float]()
            for _ in range(rounds + 1):
                with _spans() as spans:
                    alone.append(step())
                for action, begin, end in spans:
                    cells.setdefault(action, []).append(end - begin)
                with _a_processor_each(pipe) as spans:
                    together.append(step())
                whole = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
                waits.append(1 - sum(end - begin for _, begin, end in spans) / (STAGES * whole))
            simulation = simulate(schedule, lambda action, m=cells: min(m[action][1:]))  # type: ignore[misc]
            values[f"{name}: measured"] = statistics.median(waits[1:])
            values[f"{name}: simulated"] = simulation.bubble
            values[f"{name}: speed-up"] = statistics.median(alone[1:]) / statistics.median(together[1:])
        report.step(chunks=count, ideal=(STAGES - 1) / (count + STAGES - 1), **values)
    return {}
