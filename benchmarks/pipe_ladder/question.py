"""Beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to, and what does each part earn?

Two CPU stages and 1 to 16 micro-batches. One rung for each number takes steps of the three pipes in turn and gives the
ratios of their times. For each pipe and for ours with one mechanism removed, a rung of its own gives the peak memory.
One more measures cells and tells the bubble that two devices would see.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.frame.environment import Environment, here
from benchmarks.frame.plot import COLOURS, level_line, new_figure, save
from benchmarks.frame.report import write_json_lines
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.frame.table import markdown_table, mebibytes
from benchmarks.pipe_ladder.steps import FLOOR, ONES, Shape

__all__ = ["add_arguments", "broken_bounds", "run"]

MAXIMUM_RATIO = 1.0  # of processor time, ours to each ancestor's: geometric mean over the numbers of micro-batches
MAXIMUM_PEAK_RATIO = 1.02  # of peak above the model, ours to each ancestor's; samples and allocator differ by as much
PIPES = ["ours", "torchgpipe", "fairscale"]
MEASURE = "benchmarks.pipe_ladder.steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, and how often to measure."""
    parser.add_argument("--dim", type=int, default=256, metavar="N", help="channels")
    parser.add_argument("--blocks", type=int, default=4, metavar="N", help="blocks of four layers, at least 2")
    parser.add_argument("--rows", type=int, default=1024, metavar="N", help="rows of the mini-batch")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="micro-batches")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="steps of each pipe")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch's kernels")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the tables; 0 if the bounds at the head of this module hold."""
    for name in ("dim", "rows", "rounds", "threads"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"expected at least 1, got {name}={getattr(arguments, name)}")
    if arguments.blocks < 2:
        raise ValueError(f"expected at least 2 blocks for two stages, got blocks={arguments.blocks}")
    if min(arguments.chunks) < 1 or max(arguments.chunks) > arguments.rows:
        raise ValueError(f"expected from 1 to {arguments.rows} micro-batches, got chunks={arguments.chunks}")
    environment = here()
    print("\n".join(environment.lines()), flush=True)
    shape = asdict(Shape(arguments.dim, arguments.blocks, arguments.rows, arguments.threads))
    timed = run_rungs(_timed(arguments, shape))
    peaks = run_rungs(_peaks(arguments, shape))
    bubble = run_rungs(_bubbles(arguments, shape))[0]
    outcomes = [*timed, *peaks, bubble]
    print(f"\n{_time_table(timed)}\n\n{_peak_table(peaks)}\n\n{_bubble_table(bubble)}\n")
    if arguments.json:
        print(f"rungs in {write_json_lines(arguments.json, environment, outcomes)}")
    if arguments.plot and not any(outcome.failure for outcome in outcomes):
        print(f"picture in {_draw(arguments.plot, timed, peaks, bubble, environment)}")
    broken = broken_bounds(timed, peaks, bubble)
    print("\n".join(broken) if broken else "all bounds hold", file=sys.stderr if broken else sys.stdout)
    return 1 if broken else 0


def _timed(arguments: argparse.Namespace, shape: dict[str, int]) -> list[Rung]:
    settings = {"shape": shape, "names": PIPES, "rounds": arguments.rounds}
    return [
        Rung(f"time, {chunks} micro-batches", f"{MEASURE}:time_rounds", {"chunks": chunks, **settings})
        for chunks in arguments.chunks
    ]


def _peaks(arguments: argparse.Namespace, shape: dict[str, int]) -> list[Rung]:
    chunks = max(arguments.chunks)
    settings = {"shape": shape, "chunks": chunks, "steps": 5}
    return [Rung(name, f"{MEASURE}:peak", {"name": name, **settings}) for name in ONES]


def _bubbles(arguments: argparse.Namespace, shape: dict[str, int]) -> list[Rung]:
    settings = {"shape": shape, "chunks": arguments.chunks, "rounds": 3}
    return [Rung("bubble", f"{MEASURE}:bubbles", settings)]


def ratio_of(outcome: Outcome, other: str, kind: str = "processor") -> float:
    """Median over the rounds of our time to another pipe's."""
    return statistics.median(step[f"ours: {kind}"] / step[f"{other}: {kind}"] for step in outcome.steps)


def _above_model(outcome: Outcome) -> int:
    return outcome.peaks["steps"] - outcome.moments[FLOOR]


def _time_table(timed: Sequence[Outcome]) -> str:
    header = ["micro-batches", *(f"{name}, s" for name in PIPES)]
    header += [f"ours / {name}, {kind}" for name in PIPES[1:] for kind in ("processor", "clock")]
    rows = []
    for outcome in timed:
        if outcome.result is None:
            rows.append([outcome.rung.name, f"failed: {outcome.failure}", *[""] * (len(header) - 2)])
            continue
        seconds = [statistics.median(step[f"{name}: processor"] for step in outcome.steps) for name in PIPES]
        ratios = [ratio_of(outcome, name, kind) for name in PIPES[1:] for kind in ("processor", "clock")]
        rows.append([str(outcome.result["chunks"]), *(f"{s:.3f}" for s in seconds), *(f"{r:.3f}" for r in ratios)])
    return markdown_table(header, rows)


def _peak_table(peaks: Sequence[Outcome]) -> str:
    header = ["way", "micro-batches", "peak above the model", "to ours", "s/step"]
    ours = peaks[0]
    rows = []
    for outcome in peaks:
        if outcome.result is None or ours.result is None:
            rows.append([outcome.rung.name, f"failed: {outcome.failure or ours.failure}", "", "", ""])
            continue
        rows.append(
            [
                outcome.rung.name,
                str(outcome.result["chunks"]),
                mebibytes(_above_model(outcome)),
                f"{_above_model(outcome) / _above_model(ours):.2f}x",
                f"{statistics.median(step['seconds'] for step in outcome.steps):.3f}",
            ]
        )
    return markdown_table(header, rows)


def _bubble_table(bubble: Outcome) -> str:
    header = ["micro-batches", "(p-1)/(m+p-1)", "fill-drain", "1F1B"]
    rows = [
        [str(step["chunks"]), *(f"{step[name]:.1%}" for name in ("ideal", "fill-drain", "1F1B"))]
        for step in bubble.steps
    ]
    return markdown_table(header, rows)


def broken_bounds(timed: Sequence[Outcome], peaks: Sequence[Outcome], bubble: Outcome) -> list[str]:
    """What must hold and does not, one line each."""
    broken = [f"{o.rung.name}: {o.failure}" for o in (*timed, *peaks, bubble) if o.failure]
    if broken:
        return broken
    for other in PIPES[1:]:
        mean = math.exp(statistics.fmean(math.log(ratio_of(outcome, other)) for outcome in timed))
        if not mean <= MAXIMUM_RATIO:
            broken.append(f"processor time, ours / {other}, must be at most {MAXIMUM_RATIO:.2f}, is {mean:.3f}")
        theirs = next(outcome for outcome in peaks if outcome.rung.name == other)
        ratio = _above_model(peaks[0]) / _above_model(theirs)
        if not ratio <= MAXIMUM_PEAK_RATIO:
            broken.append(f"peak, ours / {other}, must be at most {MAXIMUM_PEAK_RATIO:.2f}, is {ratio:.3f}")
    return broken


def _draw(
    path: Path, timed: Sequence[Outcome], peaks: Sequence[Outcome], bubble: Outcome, environment: Environment
) -> Path:
    chunks = [outcome.rung.arguments["chunks"] for outcome in timed]
    figure, axes = new_figure(3, "Our pipe beside torchgpipe and fairscale, two CPU stages")
    for k, name in enumerate(PIPES[1:], start=1):
        ratios = [ratio_of(outcome, name) for outcome in timed]
        axes[0].plot(chunks, ratios, marker="o", color=COLOURS[k], label=f"ours / {name}")
    axes[0].set_title("processor time, over micro-batches", fontsize=10)
    level_line(axes[0], 1.0, "equal")
    names = [outcome.rung.name for outcome in peaks]
    axes[1].barh(range(len(names)), [_above_model(outcome) / 2**20 for outcome in peaks], color=COLOURS[0])
    axes[1].set_yticks(range(len(names)), names, fontsize=7)
    axes[1].invert_yaxis()
    axes[1].set_title("peak above the model, MiB", fontsize=10)
    for k, name in enumerate(("ideal", "fill-drain", "1F1B")):
        axes[2].plot(chunks, [step[name] for step in bubble.steps], marker="o", color=COLOURS[k], label=name)
    axes[2].set_title("bubble, over micro-batches", fontsize=10)
    axes[2].legend(fontsize=7, frameon=False)
    return save(figure, path, environment)
