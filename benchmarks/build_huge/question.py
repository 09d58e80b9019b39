"""Under a cap on its memory: can a process build, load and train a model whose parameters alone exceed the cap?

Three rungs train the same model from the same files, a step of each in turn. The resident one fails under the cap and
says at what; without the cap it gives the losses that must come out. The offloaded one has to finish under the cap with
these losses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.build_huge.steps import FLOOR, Shape, write_weights
from benchmarks.frame.arguments import at_least
from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, filesystem_of, here
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits
from benchmarks.frame.pairs import run_in_turn, spread, step_ratios
from benchmarks.frame.plot import COLOURS, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung
from benchmarks.frame.table import markdown_table, mebibytes, reasons
from benchmarks.frame.traffic import medium_bytes
from benchmarks.frame.work import adamw_bytes, gradient_bytes
from offload.planning.budget import parse_bytes

__all__ = ["add_arguments", "broken_bounds", "run"]

#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MEASURE = "benchmarks.build_huge.steps"
LIMIT = (
    "The limit of a step counts a forward and a backward with nothing recomputed, AdamW's reads and writes in memory, "
    "and the bytes that the offloaded model reads from files and writes there. The resident model without a cap has "
    "the allocator as it comes, which keeps freed blocks and is faster; under the cap freed blocks go back."
)
TOLERANCE = 1e-5  # of a loss, beside that of the resident model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The cap, the sizes, and where homes are."""
    parser.add_argument("--cap", default="768MiB", metavar="BYTES", help="RLIMIT_DATA of the capped rungs: all of it")
    parser.add_argument("--dim", type=int, default=1024, metavar="N", help="channels; a block has 8 dim^2 parameters")
    parser.add_argument("--blocks", type=int, default=36, metavar="N", help="blocks, each of which is one shard")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="rows of the batch")
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="steps of AdamW")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk: 9 times the weights")
    parser.add_argument(
        "--no-reference", action="store_true", help="leave out the resident model without a cap (for larger models)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the table; 0 if what the head of this module says holds."""
    if not sys.platform.startswith("linux"):
        raise ValueError(f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}")
    at_least(arguments, "dim", "blocks", "rows", "steps")
    shape = Shape(arguments.blocks, arguments.dim, arguments.rows, arguments.steps)
    cap_bytes = parse_bytes(arguments.cap, "cap")
    if shape.parameter_bytes <= cap_bytes:
        raise ValueError(
            f"expected parameters larger than the cap, got {mebibytes(shape.parameter_bytes)} under a cap of "
            f"{mebibytes(cap_bytes)}; pass more --blocks or a smaller --cap"
        )
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-huge-", dir=arguments.home) as folder:
        weights, home = Path(folder, "weights"), Path(folder, "home")
        weights.mkdir()
        limits = measure_limits(Path(folder))
        stored = write_weights(weights, shape)
        facts = (
            ("model", f"{mebibytes(shape.parameter_bytes)} of float32 parameters in {shape.blocks} shards, AdamW"),
            ("weights", f"{mebibytes(stored)} of bfloat16 in {shape.blocks} safetensors files with an index"),
            ("cap", f"RLIMIT_DATA of {mebibytes(cap_bytes)}, which counts heap, stacks and private mappings"),
            ("homes", filesystem_of(Path(folder))),
        )
        print("\n".join(f"{name:<8} {words}" for name, words in facts), flush=True)
        rungs = _rungs(shape, str(weights), str(home), cap_bytes, reference=not arguments.no_reference)
        outcomes = run_in_turn(rungs, shape.steps)
    return publish(
        arguments,
        environment,
        sections=[_table(outcomes, shape, cap_bytes, limits), LIMIT, *filter(None, [reasons(outcomes)])],
        outcomes=outcomes,
        broken=broken_bounds(outcomes, cap_bytes),
        draw=lambda path: _draw(path, outcomes, shape, cap_bytes, environment),
        facts=facts,
        limits=limits,
        ratios=_ratios(outcomes),
    )


def _rungs(shape: Shape, weights: str, home: str, cap_bytes: int, *, reference: bool) -> list[Rung]:
    common = {"shape": asdict(shape), "weights": weights}
    rungs = [
        Rung("resident, capped", f"{MEASURE}:resident", {**common, "cap_bytes": cap_bytes}, GIVE_BACK),
        Rung("offloaded, capped", f"{MEASURE}:offloaded", {**common, "cap_bytes": cap_bytes, "home": home}, GIVE_BACK),
    ]
    if reference:
        rungs.append(Rung("resident, no cap", f"{MEASURE}:resident", {**common, "cap_bytes": None}))
    return rungs


def broken_bounds(outcomes: Sequence[Outcome], cap_bytes: int) -> list[str]:
    """What must hold and does not, one line each."""
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    if broken:
        return broken
    resident, offloaded, *reference = outcomes
    if _out_of_memory(resident) is None:
        broken.append("the resident model must not fit under the cap, but it trained")
    for outcome in (offloaded, *reference):
        if (reason := _out_of_memory(outcome)) is not None:
            broken.append(f"{outcome.rung.name}: out of memory: {reason}")
    if broken:
        return broken
    if offloaded.peak_bytes > cap_bytes:
        broken.append(f"the peak must be below the cap, is {mebibytes(offloaded.peak_bytes)}")
    losses = _losses(offloaded)
    if len(losses) > 1 and not losses[-1] < losses[0]:
        broken.append(f"the loss must fall, went from {losses[0]:.6f} to {losses[-1]:.6f}")
    for outcome in reference:
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, _losses(outcome), strict=True))
        if not apart <= TOLERANCE:
            broken.append(f"losses must be those of the resident model, are {apart:.1e} apart")
    return broken


def _out_of_memory(outcome: Outcome) -> str | None:
    reason: str | None = (outcome.result or {}).get("out_of_memory")
    return reason


def _reference(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The resident model that may take what it needs, if it ran."""
    return next((o for o in outcomes if o.steps and o.rung.arguments["cap_bytes"] is None), None)


def _ratios(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Time and peak of the offloaded model to those of the resident one without a cap."""
    offloaded, reference = outcomes[1], _reference(outcomes)
    if reference is None or not offloaded.steps:
        return {}
    return {
        f"{offloaded.rung.name}: time": statistics.median(step_ratios(offloaded, reference)),
        f"{offloaded.rung.name}: peak": offloaded.peak_bytes / reference.peak_bytes,
    }


def _losses(outcome: Outcome) -> list[float]:
    return [step["loss"] for step in outcome.steps]


def limit_seconds(outcome: Outcome, shape: Shape, limits: Limits) -> float:
    """The least seconds of a step: its arithmetic, AdamW and the gradients in memory, the bytes of files."""
    parameters = shape.parameter_bytes / 4
    copied = gradient_bytes(parameters) + adamw_bytes(parameters)
    return limits.step_seconds(flops=shape.training_flops, **medium_bytes(outcome.steps, copied_bytes=copied))


def _table(outcomes: Sequence[Outcome], shape: Shape, cap_bytes: int, limits: Limits) -> str:
    header = [
        "rung",
        "parameters",
        "cap",
        "torch alone",
        "peak, building",
        "peak, training",
        "load",
        "s/step",
        "to no cap",
        *LIMIT_HEADER,
        "losses",
    ]
    rows = []
    reference = _reference(outcomes)
    for outcome in outcomes:
        cells = [
            outcome.rung.name,
            mebibytes(shape.parameter_bytes),
            mebibytes(cap_bytes) if outcome.rung.arguments["cap_bytes"] else "none",
            mebibytes(outcome.moments.get(FLOOR, 0)),
            *(mebibytes(outcome.peaks[name]) if name in outcome.peaks else "-" for name in ("build", "steps")),
        ]
        if outcome.result is None:
            cells += [*["-"] * 5, outcome.status]
        elif (reason := _out_of_memory(outcome)) is not None:
            cells += [*["-"] * 5, f"out of memory: {reason}"]
        else:
            cells.append(f"{outcome.result['load_seconds']:.1f} s")
            seconds = outcome.median("seconds")
            cells += [f"{seconds:.2f}", spread(step_ratios(outcome, reference), 2) if reference else "-"]
            cells += [*limit_cells(seconds, limit_seconds(outcome, shape, limits))]
            cells.append(", ".join(f"{loss:.6f}" for loss in _losses(outcome)))
        rows.append(cells)
    return markdown_table(header, rows)


def _draw(path: Path, outcomes: Sequence[Outcome], shape: Shape, cap_bytes: int, environment: Environment) -> Path:
    figure, (axis,) = new_figure(1, "A model larger than the memory of its process")
    for k, outcome in enumerate(outcomes):
        died = _out_of_memory(outcome) is not None
        name = f"{outcome.rung.name}{' (fails)' if died else ''}"
        axis.bar(name, outcome.peak_bytes / 2**20, color=COLOURS[k], width=0.5)
    axis.set_title("peak memory of the process, MiB", fontsize=10)
    level_line(axis, cap_bytes / 2**20, "cap")
    level_line(axis, shape.parameter_bytes / 2**20, "parameters alone")
    return save(figure, path, environment)
