"""Beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to, and what does each part earn?

Two CPU stages and 1 to 16 micro-batches. One rung for each number takes steps of the pipes in turn and gives the
ratios of their times, for cells of milliseconds and for cells of next to nothing. For each pipe and for ours with one
mechanism removed, a rung of its own gives the peak memory. One more gives each stage a worker and measures the bubble.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.frame.arguments import at_least
from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, here
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits
from benchmarks.frame.peers import Found, find_peer
from benchmarks.frame.plot import COLOURS, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.frame.table import markdown_table, mebibytes
from benchmarks.frame.work import gradient_bytes
from benchmarks.pipe_ladder.steps import ONES, Shape

__all__ = ["add_arguments", "broken_bounds", "run"]

MAXIMUM_RATIO = 1.0  # of processor time, ours to each ancestor's: geometric mean over the numbers of micro-batches
MAXIMUM_PEAK_RATIO = 1.02  # of peak above the model, ours to each ancestor's; samples and allocator differ by as much
PIPES = ["ours", "torchgpipe", "fairscale"]
MEASURE = "benchmarks.pipe_ladder.steps"
TINY = {"dim": 16, "rows": 64}  # where layers take next to no time, and nearly all is what a pipe adds
#: Of these, as many times the rounds, and steps in a row until a turn has so many micro-batches: a step of a
#: millisecond differs by a third from the next one, and costs nothing.
MORE_ROUNDS = 15
TURN_MICROBATCHES = 16
#: Where pipes take turns in one process, glibc may give one's pages back just before the next one wants them, and which
#: of them pays for new ones is chance. Kept, they cost nobody anything.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
#: Where memory is measured, what is freed goes back at once: what glibc keeps of it is chance too.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
TIME = (
    "Time: steps of the pipes in turn, in one process; medians. `processor` is processor time, which other work on the "
    "machine does not change; `clock` is time by the clock. The bound is on processor time of the first table. glibc "
    "keeps freed memory here, so that no pipe pays for pages that another one gave back. The limit of a step counts a "
    "forward and a backward with nothing recomputed, at the rate of a large product with as many threads; the distance "
    "is of ours by the clock."
)
TIME_TINY = f"The same with {TINY['dim']} channels and {TINY['rows']} rows: what a pipe itself costs. No bound."
PEAK = (
    "Memory and time of each way at the largest number of micro-batches, each in a process of its own and with freed "
    "memory given back at once, which costs time. Below the first three: ours with another schedule, or with a "
    "mechanism taken away."
)
BUBBLE = (
    "Bubble: the share of their time in which two stages wait for each other, in `train_step`. Measured with a worker "
    "for each stage on a processor of its own; simulated on paper from the times of the cells one after another. "
    "Speed-up: the step with one worker, to the step with two."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, and how often to measure."""
    parser.add_argument("--dim", type=int, default=384, metavar="N", help="channels")
    parser.add_argument("--blocks", type=int, default=4, metavar="N", help="blocks of four layers, at least 2")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="rows of the mini-batch")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="micro-batches")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="steps of each pipe")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch's kernels")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on the disk to be measured")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the tables; 0 if the bounds at the head of this module hold."""
    at_least(arguments, "dim", "rows", "rounds", "threads", blocks=2)
    if min(arguments.chunks) < 1 or max(arguments.chunks) > arguments.rows:
        raise ValueError(f"expected from 1 to {arguments.rows} micro-batches, got chunks={arguments.chunks}")
    environment = here()
    print("\n".join(environment.lines()), flush=True)
    limits = measure_limits(arguments.home, threads=arguments.threads)
    shape = asdict(Shape(arguments.dim, arguments.blocks, arguments.rows, arguments.threads))
    tiny = {**shape, **TINY}
    timed = run_rungs(_timed(arguments, shape, "time"))
    overhead = run_rungs(_timed(arguments, tiny, "tiny cells", MORE_ROUNDS, TURN_MICROBATCHES))
    peaks = run_rungs(_peaks(arguments, shape))
    bubble = run_rungs(_bubbles(arguments, shape))[0]
    return publish(
        arguments,
        environment,
        sections=[
            *(TIME, _time_table(timed, limits)),
            *(TIME_TINY, _time_table(overhead, limits)),
            *(PEAK, _peak_table(peaks, limits), *without_result(peaks)),
            *(BUBBLE, _bubble_table(bubble)),
        ],
        outcomes=[*timed, *overhead, *peaks, bubble],
        broken=broken_bounds(timed, peaks, bubble),
        draw=lambda path: _draw(path, timed, peaks, bubble, environment),
        facts=[("model", f"{arguments.blocks} blocks of {arguments.dim} channels, {arguments.rows} rows, two stages")],
        limits=limits,
        ratios=_ratios(timed, overhead, peaks),
    )


def without_result(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each rung that has nothing to show."""
    return [f"{outcome.rung.name}: {outcome.reason}" for outcome in outcomes if outcome.reason]


def _ratios(timed: Sequence[Outcome], overhead: Sequence[Outcome], peaks: Sequence[Outcome]) -> dict[str, float]:
    """Processor time of ours to each ancestor's, and peaks to ours."""
    found = {}
    for title, outcomes in (("time", timed), ("tiny cells", overhead)):
        done = [outcome for outcome in outcomes if outcome.result is not None]
        for other in done[0].rung.arguments["names"][1:] if done else ():
            found |= {f"{outcome.rung.name}: ours / {other}": ratio_of(outcome, other) for outcome in done}
            found[f"{title}, geometric mean: ours / {other}"] = mean_ratio(done, other)
    ours, *others = peaks
    if ours.result is not None:
        for outcome in others:
            if outcome.result is not None:
                found[f"{outcome.rung.name}: peak to ours"] = _above_model(outcome) / _above_model(ours)
    return found


def _names() -> list[str]:
    """Ours, and the ancestors that are installed here: steps in turn are of one process."""
    return [PIPES[0], *(name for name in PIPES[1:] if isinstance(find_peer(name), Found))]


def _timed(
    arguments: argparse.Namespace, shape: dict[str, int], title: str, times: int = 1, microbatches: int = 1
) -> list[Rung]:
    """A rung for each number of micro-batches: so many ``times`` the rounds, in turns of at least ``microbatches``."""
    settings = {"shape": shape, "names": _names(), "rounds": times * arguments.rounds}
    rungs = []
    for chunks in arguments.chunks:
        if chunks <= shape["rows"]:
            of_rung = {"chunks": chunks, "repeats": -(-microbatches // chunks), **settings}
            rungs.append(Rung(f"{title}, {chunks} micro-batches", f"{MEASURE}:time_rounds", of_rung, KEEP_PAGES))
    return rungs


def _peaks(arguments: argparse.Namespace, shape: dict[str, int]) -> list[Rung]:
    chunks = max(arguments.chunks)
    settings = {"shape": shape, "chunks": chunks, "steps": 5}
    return [
        Rung(name, f"{MEASURE}:peak", {"name": name, **settings}, GIVE_BACK, peer=name if name in PIPES[1:] else "")
        for name in ONES
    ]


def _bubbles(arguments: argparse.Namespace, shape: dict[str, int]) -> list[Rung]:
    settings = {"shape": shape, "chunks": arguments.chunks, "rounds": 5}
    return [Rung("bubble", f"{MEASURE}:bubbles", settings)]


def ratio_of(outcome: Outcome, other: str, kind: str = "processor") -> float:
    """Median over the rounds of our time to another pipe's."""
    return statistics.median(step[f"ours: {kind}"] / step[f"{other}: {kind}"] for step in outcome.steps)


def _above_model(outcome: Outcome) -> int:
    return int((outcome.result or {})["above_model"])


def limit_seconds(outcome: Outcome, limits: Limits) -> float:
    """The least seconds for the arithmetic of a step, and to read each parameter and write its gradient."""
    shape = Shape(**outcome.rung.arguments["shape"])
    return limits.step_seconds(flops=shape.training_flops, copied_bytes=gradient_bytes(shape.parameters))


def _time_table(timed: Sequence[Outcome], limits: Limits) -> str:
    names = list(timed[0].rung.arguments["names"])
    header = ["micro-batches", *(f"{name}, ms" for name in names)]
    header += [f"ours / {name}, {kind}" for name in names[1:] for kind in ("processor", "clock")]
    header += LIMIT_HEADER
    rows = []
    for outcome in timed:
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.reason, *[""] * (len(header) - 2)])
            continue
        seconds = [outcome.median(f"{name}: processor") for name in names]
        ratios = [ratio_of(outcome, name, kind) for name in names[1:] for kind in ("processor", "clock")]
        clock = outcome.median(f"{names[0]}: clock")
        rows.append(
            [
                str(outcome.result["chunks"]),
                *(f"{1e3 * s:.1f}" for s in seconds),
                *(f"{r:.3f}" for r in ratios),
                *limit_cells(clock, limit_seconds(outcome, limits)),
            ]
        )
    if all(outcome.result is not None for outcome in timed):
        means = [mean_ratio(timed, name, kind) for name in names[1:] for kind in ("processor", "clock")]
        rows.append(["geometric mean", *[""] * len(names), *(f"{mean:.3f}" for mean in means), "", ""])
    return markdown_table(header, rows)


def mean_ratio(timed: Sequence[Outcome], other: str, kind: str = "processor") -> float:
    """Geometric mean over the numbers of micro-batches of :func:`ratio_of`."""
    return math.exp(statistics.fmean(math.log(ratio_of(outcome, other, kind)) for outcome in timed))


def _peak_table(peaks: Sequence[Outcome], limits: Limits) -> str:
    header = ["way", "micro-batches", "peak above the model", "to ours", "ms/step", *LIMIT_HEADER]
    ours = peaks[0]
    rows = []
    for outcome in peaks:
        if outcome.result is None or ours.result is None:
            rows.append([outcome.rung.name, outcome.status, *[""] * (len(header) - 2)])
            continue
        seconds = outcome.median("seconds")
        rows.append(
            [
                outcome.title,
                str(outcome.result["chunks"]),
                mebibytes(_above_model(outcome)),
                f"{_above_model(outcome) / _above_model(ours):.2f}x",
                f"{1e3 * seconds:.0f}",
                *limit_cells(seconds, limit_seconds(outcome, limits)),
            ]
        )
    return markdown_table(header, rows)


BUBBLES = [f"{name}: {what}" for name in ("fill-drain", "1F1B") for what in ("measured", "simulated")]


def _bubble_table(bubble: Outcome) -> str:
    header = ["micro-batches", "(p-1)/(m+p-1)", *BUBBLES, "fill-drain: speed-up", "1F1B: speed-up"]
    rows = [
        [
            str(step["chunks"]),
            *(f"{step[name]:.1%}" for name in ("ideal", *BUBBLES)),
            *(f"{step[f'{name}: speed-up']:.2f}x" for name in ("fill-drain", "1F1B")),
        ]
        for step in bubble.steps
    ]
    return markdown_table(header, rows)


def broken_bounds(timed: Sequence[Outcome], peaks: Sequence[Outcome], bubble: Outcome) -> list[str]:
    """What must hold and does not, one line each."""
    broken = [f"{o.rung.name}: {o.failure}" for o in (*timed, *peaks, bubble) if o.failure]
    if broken:
        return broken
    for other in timed[0].rung.arguments["names"][1:]:
        mean = mean_ratio(timed, other)
        if not mean <= MAXIMUM_RATIO:
            broken.append(f"processor time, ours / {other}, must be at most {MAXIMUM_RATIO:.2f}, is {mean:.3f}")
    for theirs in peaks:
        if theirs.rung.peer and theirs.result is not None:
            ratio = _above_model(peaks[0]) / _above_model(theirs)
            if not ratio <= MAXIMUM_PEAK_RATIO:
                broken.append(f"peak, ours / {theirs.rung.name}, must be at most {MAXIMUM_PEAK_RATIO}, is {ratio:.3f}")
    return broken


def _draw(
    path: Path, timed: Sequence[Outcome], peaks: Sequence[Outcome], bubble: Outcome, environment: Environment
) -> Path:
    chunks = [outcome.rung.arguments["chunks"] for outcome in timed]
    figure, axes = new_figure(3, "Our pipe beside torchgpipe and fairscale, two CPU stages")
    peaks = [outcome for outcome in peaks if outcome.result is not None]
    for k, name in enumerate(timed[0].rung.arguments["names"][1:], start=1):
        ratios = [ratio_of(outcome, name) for outcome in timed]
        axes[0].plot(chunks, ratios, marker="o", color=COLOURS[k], label=f"ours / {name}")
    axes[0].set_title("processor time, over micro-batches", fontsize=10)
    level_line(axes[0], 1.0, "equal")
    names = [outcome.rung.name for outcome in peaks]
    axes[1].barh(range(len(names)), [_above_model(outcome) / 2**20 for outcome in peaks], color=COLOURS[0])
    axes[1].set_yticks(range(len(names)), names, fontsize=7)
    axes[1].invert_yaxis()
    axes[1].set_title("peak above the model, MiB", fontsize=10)
    for k, name in enumerate(("ideal", "fill-drain: measured", "1F1B: measured")):
        axes[2].plot(chunks, [step[name] for step in bubble.steps], marker="o", color=COLOURS[k], label=name)
    axes[2].set_title("bubble, over micro-batches", fontsize=10)
    axes[2].legend(fontsize=7, frameon=False)
    return save(figure, path, environment)
