"""How near to its slowest part does training come when a slow loader, slow rows and compute overlap?

Each rung has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and
of each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, they take their sum. torchrec's
pipeline is driven over the same model, table and loader, where it is installed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.frame.arguments import at_least
from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, filesystem_of, here
from benchmarks.frame.extra import require
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits
from benchmarks.frame.plot import COLOURS, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.frame.table import markdown_table
from benchmarks.train_overlap.steps import IN_TURN, OURS, PIPELINED, TORCHREC, Shape

__all__ = ["add_arguments", "run"]

MAXIMUM_RATIO = 1.10  # of the overlapped step to the slowest part alone
# Latency of the loader and of the rows, as shares of the compute time.
BALANCES = {
    "compute is slowest": (0.5, 0.5),
    "the loader is slowest": (1.5, 0.6),
    "rows are slowest": (0.6, 1.5),
    "all are even": (1.0, 1.0),
}
PARTS = ("load", "rows", "compute")
LIMIT = (
    "The limit of a step is the longest of the two latencies, which no machine shortens, of the matrix products on one "
    "thread, and of the copies of the rows that it reads."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, the number of rounds, and where the table is."""
    parser.add_argument("--table-rows", type=int, default=200_000, metavar="N", help="rows of the table")
    parser.add_argument("--table-dim", type=int, default=64, metavar="N", help="columns of the table")
    parser.add_argument("--bags", type=int, default=512, metavar="N", help="rows of the batch")
    parser.add_argument("--indices", type=int, default=4, metavar="N", help="rows of the table for each of them")
    parser.add_argument("--width", type=int, default=768, metavar="N", help="channels of the dense part")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="repetitions of each rung")
    parser.add_argument("--batches", type=int, default=12, metavar="N", help="timed batches of each way in a round")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the table")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the table; 0 if every rung holds the bound at the head of this module."""
    at_least(arguments, "table_rows", "table_dim", "bags", "indices", "width", "rounds", "batches")
    for package in ("tqdm", *(("matplotlib",) if arguments.plot or arguments.out else ())):
        require(package)
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="train-overlap-", dir=arguments.home) as home:
        print(f"homes    {home} ({filesystem_of(Path(home))})", flush=True)
        limits = measure_limits(Path(home), threads=1)
        outcomes = run_rungs(_rungs(arguments, home))
    return publish(
        arguments,
        environment,
        sections=[_table(outcomes, limits), LIMIT],
        outcomes=outcomes,
        broken=_broken(outcomes),
        draw=lambda path: _draw(path, outcomes, environment),
        facts=[("homes", f"a directory on {filesystem_of(arguments.home)}")],
        limits=limits,
        ratios={f"{o.rung.name}: pipelined / slowest": o.median("ratio") for o in outcomes if o.result is not None},
    )


def _rungs(arguments: argparse.Namespace, home: str) -> list[Rung]:
    sizes = {name: getattr(arguments, name) for name in ("table_rows", "table_dim", "bags", "indices", "width")}
    settings = {"home": home, "rounds": arguments.rounds, "batches": arguments.batches}

    def rung(balance: str, pipeline: str) -> Rung:
        load, rows = BALANCES[balance]
        return Rung(
            balance if pipeline == OURS else f"{balance}: {pipeline}",
            "benchmarks.train_overlap.steps:measure",
            {"shape": asdict(Shape(**sizes)), "load": load, "rows": rows, "pipeline": pipeline, **settings},
            peer="" if pipeline == OURS else pipeline,
        )

    return [*(rung(balance, OURS) for balance in BALANCES), rung("all are even", TORCHREC)]


def limit_seconds(outcome: Outcome, limits: Limits) -> float:
    """The least seconds of a step with everything hidden that can be."""
    result = outcome.result or {}
    shape = Shape(**outcome.rung.arguments["shape"])
    work = limits.step_seconds(flops=shape.training_flops, copied_bytes=result["bytes_of_rows"])
    return max(work, *result["latencies"])


def _table(outcomes: Sequence[Outcome], limits: Limits) -> str:
    header = [
        "rung",
        *(f"{part} alone" for part in PARTS),
        IN_TURN,
        PIPELINED,
        "pipelined / slowest",
        *LIMIT_HEADER,
        "read again",
    ]
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, outcome.reason, *[""] * (len(header) - 2)])
            continue
        ratios = sorted(step["ratio"] for step in outcome.steps)
        rows.append(
            [
                outcome.title,
                *(f"{1e3 * outcome.median(name):.1f} ms" for name in (*PARTS, IN_TURN, PIPELINED)),
                f"{outcome.median('ratio'):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                *limit_cells(outcome.median(PIPELINED), limit_seconds(outcome, limits)),
                f"{outcome.result['rows_refreshed'] / outcome.result['rows_read']:.1%}",
            ]
        )
    return markdown_table(header, rows)


def _broken(outcomes: Sequence[Outcome]) -> list[str]:
    """What must hold and does not, one line each."""
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    for outcome in outcomes:
        if outcome.result is None or outcome.rung.peer:
            continue
        if outcome.result["undistributed"]:
            broken.append(f"{outcome.rung.name}: rows did not run ahead: {outcome.result['undistributed']}")
        if not outcome.median("ratio") <= MAXIMUM_RATIO:
            broken.append(
                f"{outcome.rung.name}: the pipelined step must take at most {MAXIMUM_RATIO:.2f} of the slowest part, "
                f"takes {outcome.median('ratio'):.3f}"
            )
    return broken


def _draw(path: Path, outcomes: Sequence[Outcome], environment: Environment) -> Path:
    shown = [outcome for outcome in outcomes if outcome.result is not None]
    figure, axes = new_figure(len(shown), "A step: its parts one on the other, and pipelined")
    for axis, outcome in zip(axes, shown, strict=True):
        bottom = 0.0
        for k, part in enumerate(PARTS):
            milliseconds = 1e3 * outcome.median(part)
            axis.bar(0, milliseconds, bottom=bottom, color=COLOURS[k], label=part)
            bottom += milliseconds
        for x, way in ((1, IN_TURN), (2, PIPELINED)):
            axis.bar(x, 1e3 * outcome.median(way), color="#999999")
        axis.axhline(1e3 * outcome.median("slowest"), color="#333333", linestyle="--", linewidth=1, label="slowest")
        axis.set_xticks(range(3), ["alone", IN_TURN, PIPELINED], fontsize=8)
        axis.set_title(f"{outcome.rung.name}, ms", fontsize=10)
    axes[0].legend(fontsize=7, frameon=False)
    return save(figure, path, environment)
