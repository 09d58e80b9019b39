"""``pipe-ladder``: time and memory of our pipe beside torchgpipe's and fairscale's.

Two CPU stages and 1 to 16 micro-batches. One case for each number takes steps of the pipes in turn and gives the
ratios of their times, for cells of milliseconds and for tiny cells. For each pipe, and for other schedules of ours,
another case gives the peak memory.

All pipes get the same layers, the same mini-batch and the same number of micro-batches. What differs is what a pipe
adds to the layers, and what it keeps in memory.
"""

import contextlib
import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.peers import find_peer
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes
from benchmarks.harness.worker import Reporter
from pipe import Pipe

MAXIMUM_RATIO = 1.0  # of processor time, ours to each ancestor's: geometric mean over the numbers of micro-batches
MAXIMUM_PEAK_RATIO = 1.02  # of the peak above the model; the allocator makes as much difference
PIPES = ["ours", "torchgpipe", "fairscale"]
TINY = {"dim": 16, "rows": 64}  # layers take next to no time: nearly all of a step is what a pipe adds
KINDS = ("processor", "clock")
TIME = (
    "Time: steps of the pipes in turn, in one process; medians. A step clears the gradients of the one before. "
    "`processor` is processor time, which other work on the machine does not change; `clock` is time by the clock. The "
    "bound is on processor time of the first table. glibc keeps freed memory here, so that no pipe pays for pages that "
    "another one returned."
)
TINY_TIME = f"The same with {TINY['dim']} channels and {TINY['rows']} rows: what a pipe itself costs. No bound."
PEAK = (
    "Memory and time of each method at the largest number of micro-batches, each in its own process and with freed "
    "memory returned at once, which takes time. Below the first three: ours with another schedule."
)
#: Of tiny cells: as many times the rounds, and steps in a row until a turn has so many micro-batches. A step of a
#: millisecond differs by a third from the next one, and takes next to no time.
MORE_ROUNDS = 15
TURN_MICROBATCHES = 16
#: Where pipes take turns in one process, glibc may return one's pages just before the next one needs them. Kept, they
#: cost no pipe anything.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
#: Where memory is measured, freed memory is returned at once: how much glibc keeps is chance.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


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
    return lambda x: (pipe.zero_grad(), _loss(pipe(x)).backward())


def _ours(settings: Settings, chunks: int, checkpoint: str = "except_last") -> Pipe:
    return Pipe(settings.model(), settings.balance, ["cpu"] * STAGES, chunks=chunks, checkpoint=checkpoint)


def _ancestor(settings: Settings, chunks: int, module: str, name: str) -> Steps:
    pipe = getattr(importlib.import_module(module), name)
    return _through_autograd(pipe(settings.model(), settings.balance, devices=["cpu"] * STAGES, chunks=chunks))


def _scheduled(settings: Settings, chunks: int, name: str, checkpoint: str = "except_last") -> Steps:
    pipe = _ours(settings, chunks, checkpoint)
    how: dict[str, Any] = {"schedule": name, "reduction": "mean"}
    return lambda x: (pipe.zero_grad(), pipe.train_step(x, None, lambda output, target: _loss(output), **how))


METHODS: dict[str, Callable[[Settings, int], Steps]] = {
    "ours": lambda settings, chunks: _through_autograd(_ours(settings, chunks)),
    "torchgpipe": partial(_ancestor, module="torchgpipe", name="GPipe"),
    "fairscale": partial(_ancestor, module="fairscale.nn", name="Pipe"),
    "ours, 1F1B": partial(_scheduled, name="1f1b"),
    "ours, 1F1B, nothing recomputed": partial(_scheduled, name="1f1b", checkpoint="never"),
    "ours, nothing recomputed": lambda settings, chunks: _through_autograd(_ours(settings, chunks, "never")),
}
"""By name, what makes a step from settings and a number of micro-batches."""


def measure(run: Run) -> None:
    """Time, tiny cells, peaks."""
    names = PIPES[:1]  # steps in turn are of one process: the ancestors that are installed here
    for name in PIPES[1:]:
        with contextlib.suppress(CannotRunError):
            names += [name] if find_peer(name) else []

    def case(title: str, function: str, environment: dict[str, str], sizes: Settings, **how: Any) -> Case:
        peer = title if title in PIPES[1:] else ""
        return Case(title, f"benchmarks.pipe_ladder:{function}", {"settings": asdict(sizes), **how}, environment, peer)

    def timed(title: str, sizes: Settings, microbatches: int) -> list[Case]:
        return [
            case(
                f"{title}, {n} micro-batches", "time_rounds", KEEP_PAGES, sizes, chunks=n, names=names, repeats=repeats
            )
            for n, repeats in ((n, -(-microbatches // n)) for n in sizes.chunks if n <= sizes.rows)
        ]

    tiny = replace(run.settings, **TINY, rounds=MORE_ROUNDS * run.settings.rounds)
    run.group("time", timed("time", run.settings, 1))
    run.group("tiny cells", timed("tiny cells", tiny, TURN_MICROBATCHES))
    run.group("peaks", [case(name, "peak", GIVE_BACK, run.settings, name=name, steps=5) for name in METHODS])


def report(run: Run) -> list[str]:
    """Times, peaks."""
    groups, peaks = run.groups, run.groups["peaks"]

    def times(outcomes: Sequence[Outcome]) -> str:
        names = _names(outcomes)
        columns: dict[str, Callable[[Outcome], str]] = {}
        for name in names:
            columns[f"{name}, ms"] = lambda o, key=f"{name}: processor": f"{1e3 * o.median(key):.1f}"
        for name in names[1:]:
            for kind in KINDS:
                columns[f"ours / {name}, {kind}"] = lambda o, pair=(name, kind): f"{ratio_of(o, *pair):.3f}"
        means = [
            f"{name}, {kind}: {mean_ratio(outcomes, name, kind):.3f}"
            for name in names[1:]
            for kind in KINDS
            if not any(outcome.reason for outcome in outcomes)
        ]
        table = case_table(outcomes, columns)
        return f"{table}\n\nGeometric means of ours to {'; '.join(means)}." if means else table

    held = {
        "micro-batches": lambda o: str(o.result["chunks"]),
        "peak above the model": lambda o: mebibytes(_above(o)),
        "to ours": lambda o: f"{_above(o) / _above(peaks[0]):.2f}x" if peaks[0].result else "-",
        "ms/step": lambda o: f"{1e3 * o.median():.0f}",
    }
    sections = [TIME, times(groups["time"]), TINY_TIME, times(groups["tiny cells"])]
    return [*sections, PEAK, case_table(peaks, held, "method")]


def _above(outcome: Outcome) -> int:
    """Peak bytes above the model; a tiny model may need no page more."""
    return max(1, int(outcome.result["above_model"]))


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    """The pipes that were timed: those that the first finished case reports."""
    done = next((outcome for outcome in outcomes if outcome.steps), None)
    return [name for name in PIPES if done is not None and f"{name}: clock" in done.steps[0]]


def ratio_of(outcome: Outcome, other: str, kind: str = "processor") -> float:
    """Median over the rounds of our time to another pipe's."""
    return float(statistics.median(step[f"ours: {kind}"] / step[f"{other}: {kind}"] for step in outcome.steps))


def mean_ratio(timed: Sequence[Outcome], other: str, kind: str = "processor") -> float:
    """Geometric mean over the numbers of micro-batches of :func:`ratio_of`."""
    return statistics.geometric_mean(ratio_of(outcome, other, kind) for outcome in timed)


def bounds(run: Run) -> list[str]:
    """Ours takes no more processor time than an ancestor, and as good as no more memory."""
    broken: list[str] = []
    timed, (ours, *others) = run.groups["time"], run.groups["peaks"]
    for name in _names(timed)[1:]:
        what = f"processor time, ours / {name}:"
        broken += at_most(what, mean_ratio(timed, name), MAXIMUM_RATIO, "{:.3f}".format)
    for outcome in others:
        if outcome.case.peer and outcome.result is not None:
            ratio = _above(ours) / _above(outcome)
            broken += at_most(f"peak, ours / {outcome.name}:", ratio, MAXIMUM_PEAK_RATIO, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Beside each ancestor: processor time, a ratio for each number of micro-batches, and memory."""
    timed, ours = run.groups["time"], run.groups["peaks"][0]
    counts = run.settings.chunks
    set_up = f"processor time of two CPU stages, {counts[0]} to {counts[-1]} micro-batches"
    found = []
    for name, words in (("torchgpipe", "torchgpipe 0.0.7"), ("fairscale", "fairscale 0.4.13 Pipe")):
        theirs = run.find(name, "peaks")
        times = [ratio_of(outcome, name) for outcome in timed]
        memory = ours.result["above_model"] / theirs.result["above_model"]
        found.append(Claim(set_up, words, times, memory, " above the model", statistics.geometric_mean))
    return found


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)

# --- cases -----------------------------------------------------------------------------------------------------------


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
