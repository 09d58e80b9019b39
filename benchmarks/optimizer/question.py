"""What do clipping and AdamW cost when parameters, gradients and moments rest on disk?

Training steps of the same model, clipped by their global norm: resident and checkpointed, with torch's fused AdamW; and
streamed, with the updates hidden behind the next forward. Each way has a process of its own and they take turns, so the
ratios are of steps that shared their moment. An update that runs on between two turns would cost its way nothing: a way
that leaves one is given a step that is not timed, one that is, and finishes what is left before others go on. What a
way leaves to the kernel's page cache is written out before others go on, and the time of that stands in the table. Ours
spend a part of the memory that they save on graphs that are not recomputed; the peak beside the time shows the rest.

With ``--parameters 1e9`` nothing is resident: how little memory does a model need whose parameters, gradients and
moments are larger than the memory that it may take, and what is its step beside DeepSpeed's, which can train it too?
They take their steps in turn: slow minutes hit both. DeepSpeed's memory, held while it waits, is room that the page
cache lacks for our files. With ``--alone`` each has the machine to itself, as it would have at a user's: in each round
a process of one, then a process of the other. DeepSpeed recomputes each block, as the resident model does; with
``--peer-keeps`` it keeps its activations, which takes less arithmetic and more memory.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, filesystem_of, here
from benchmarks.frame.limits import Limits, measure_limits
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import Paired, run_apart, run_in_turn, run_pairs
from benchmarks.frame.plot import bars, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.optimizer.shape import Shape, parameters_of_block
from benchmarks.optimizer.steps import FLOOR, STEPS, greatest_difference
from benchmarks.optimizer.tables import beside, large_table, paired_table

__all__ = ["add_arguments", "broken_bounds", "broken_large", "run"]

MAXIMUM_RATIO = 1.05  # of the step on disk to the resident one
MAXIMUM_DIFFERENCE = 1e-6  # of any parameter tensor at the end, relative
MINIMUM_SPEEDUP = 1.5  # over DeepSpeed
MAXIMUM_MEMORY_SHARE = 0.25  # of DeepSpeed's
MAXIMUM_LARGE_BYTES = 2 << 30  # for a billion parameters
STEPS_ALONE = 2  # of a process that has the machine to itself; it takes longer to get ready than for these
BYTES_AT_REST = 16  # of each parameter: itself, its gradient and two moments
REFERENCE = "resident"
DISK = "disk"
LARGE = "from meta"
PEER = "deepspeed"
NAMES = {
    REFERENCE: "resident, checkpointed, fused AdamW",
    DISK: "on disk",
    "host": "in host memory",
    "in backward": "on disk, updates in backward, not clipped",
    "serial": "on disk, all updates in step()",
    LARGE: "on disk, from birth",
    PEER: "DeepSpeed ZeRO-3, NVMe",
}
COMPARED = (DISK, "host", "serial")  # with the reference's parameters: same clipping, our arithmetic


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, which ways to run, how often, and where homes are."""
    defaults = Shape()
    parser.add_argument("--blocks", type=int, default=defaults.blocks, metavar="N", help="transformer blocks")
    parser.add_argument("--dim", type=int, default=defaults.dim, metavar="N", help="channels, a multiple of 64")
    parser.add_argument("--rows", type=int, default=defaults.rows, metavar="N", help="rows of the batch")
    parser.add_argument("--positions", type=int, default=defaults.positions, metavar="N", help="tokens of a row")
    parser.add_argument("--slots", type=int, default=defaults.slots, metavar="N", help="blocks held at once, in ours")
    parser.add_argument("--graphs", type=int, default=defaults.graph_mebibytes, metavar="MiB", help="kept, in ours")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="pairs of steps of the main way")
    parser.add_argument("--other-pairs", type=int, default=3, metavar="N", help="pairs of steps of each other way")
    ways = [name for name in NAMES if name not in (REFERENCE, LARGE)]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, help="which to run beside the resident one")
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="a model of about so many parameters, on disk from birth; beside it only DeepSpeed",
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="with --parameters: each with the machine to itself, in each round a process of each",
    )
    parser.add_argument(
        "--peer-keeps", action="store_true", help="DeepSpeed keeps its activations instead of recomputing each block"
    )
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the tables; 0 if the bounds at the head of this module hold."""
    small = [name for name in ("pairs", "other_pairs") if getattr(arguments, name) < 1]
    if small:
        raise ValueError("expected at least 1, got " + ", ".join(f"{n}={getattr(arguments, n)}" for n in small))
    sizes: dict[str, Any] = {name: getattr(arguments, name) for name in ("blocks", "dim", "rows", "positions")}
    sizes["graph_mebibytes"] = arguments.graphs
    sizes["slots"] = arguments.slots
    if arguments.parameters is not None:
        sizes["blocks"] = max(1, round(arguments.parameters / parameters_of_block(arguments.dim)))
        # Every block moves the sum that the last one answers with: deeper, each may move it less.
        sizes["learning_rate"] = Shape.learning_rate * min(1.0, Shape.blocks / sizes["blocks"])
    shape = Shape(**sizes)
    arguments.home.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(arguments.home).free
    if room < 1.2 * BYTES_AT_REST * shape.parameters:
        raise ValueError(
            f"expected {1.2 * BYTES_AT_REST * shape.parameters / 1e9:.0f} GB of free disk for a model of "
            f"{shape.parameters / 1e6:,.0f} M parameters, got {room / 1e9:.0f} GB in home={arguments.home}"
        )
    environment = here()
    print("\n".join(environment.lines()))
    with tempfile.TemporaryDirectory(prefix="optimizer-", dir=arguments.home) as folder:
        print(f"homes    {folder} ({filesystem_of(Path(folder))})", flush=True)
        limits = measure_limits(Path(folder))
        answer = _run_large if arguments.parameters is not None else _run_beside
        return answer(arguments, shape, Path(folder), environment, limits)


def _facts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    return [("homes", f"a directory on {filesystem_of(arguments.home)}")]


# --- beside the resident model ------------------------------------------------------------------------------------


def _run_beside(
    arguments: argparse.Namespace, shape: Shape, folder: Path, environment: Environment, limits: Limits
) -> int:
    reference: Outcome | None = None
    found: list[Paired] = []
    differences: dict[str, float] = {}
    for ways, pairs in (
        ([way for way in arguments.ways if way == DISK], arguments.pairs),
        ([way for way in arguments.ways if way != DISK], arguments.other_pairs),
    ):
        if not ways:
            continue
        # The first step, a turn that is not counted, and the pairs. The reference goes on for other ways after that.
        save_after = 2 + pairs
        main, *others = (_rung(way, shape, folder, save_after, arguments.peer_keeps) for way in (REFERENCE, *ways))
        outcome, paired = run_pairs(main, others, pairs)
        reference = reference or outcome
        for way, result in zip(ways, paired, strict=True):
            if way in (*COMPARED, PEER) and result.outcome.result is not None and outcome.result is not None:
                differences[way] = greatest_difference(_saved(folder, REFERENCE), _saved(folder, way))
        found += paired
    assert reference is not None
    by_way = {_way_of(paired.outcome): paired for paired in found}
    outcomes = [reference, *(paired.outcome for paired in found)]
    return publish(
        arguments,
        environment,
        sections=[paired_table(reference, by_way, differences, shape, limits), _sentence(by_way)],
        outcomes=outcomes,
        broken=broken_bounds(reference, by_way, differences),
        draw=lambda path: _draw(path, reference, found, environment),
        limits=limits,
        facts=_facts(arguments),
    )


def _rung(way: str, shape: Shape, folder: Path, save_after: int, peer_keeps: bool) -> Rung:
    home = folder / way.replace(" ", "-")
    home.mkdir(exist_ok=True)
    settings = {"shape": asdict(shape), "home": str(home), "save_after": save_after}
    settings["save_to"] = str(_saved(folder, way)) if way in (REFERENCE, *COMPARED, PEER) else None
    if way == PEER:
        return Rung(
            NAMES[way] + (", activations kept" if peer_keeps else ""),
            "benchmarks.optimizer.deepspeed_way:train",
            {**settings, "checkpointed": not peer_keeps},
            {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"},
            peer=PEER,
        )
    return Rung(NAMES[way], "benchmarks.optimizer.steps:train", {"way": way, **settings})


def _saved(folder: Path, way: str) -> Path:
    return folder / f"{way.replace(' ', '-')}.pt"


def _way_of(outcome: Outcome) -> str:
    return PEER if outcome.rung.peer else str(outcome.rung.arguments["way"])


def broken_bounds(reference: Outcome, found: dict[str, Paired], differences: dict[str, float]) -> list[str]:
    """What must hold and does not, one line each."""
    outcomes = [reference, *(paired.outcome for paired in found.values())]
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    for way in COMPARED:
        if way in differences and not differences[way] <= MAXIMUM_DIFFERENCE:
            broken.append(
                f"{NAMES[way]}: parameters must agree with the resident model's to {MAXIMUM_DIFFERENCE:.0e}, "
                f"they differ by {differences[way]:.1e}"
            )
    ours, theirs = found.get(DISK), found.get(PEER)
    if ours is None or ours.outcome.result is None:
        return broken
    if not ours.ratio() <= MAXIMUM_RATIO:
        broken.append(
            f"{NAMES[DISK]}: a step must take at most {MAXIMUM_RATIO:.2f} of the resident one, takes {ours.ratio():.3f}"
        )
    if theirs is not None and theirs.outcome.result is not None:
        share = ours.outcome.peaks[STEPS] / theirs.outcome.peaks[STEPS]
        broken += _broken_beside(theirs.ratio() / ours.ratio(), share)
    return broken


def _sentence(found: dict[str, Paired]) -> str:
    ours, theirs = found.get(DISK), found.get(PEER)
    words = (
        "A ratio is the median of the pairs' and from where to where they go. `kernel` is the time that the kernel "
        "took afterwards to write out what was left in its page cache. Bytes are what passed read and write (or "
        "reached the device, where that is more), for each parameter and step, boundaries between blocks included."
    )
    if ours is not None and theirs is not None and ours.outcome.result and theirs.outcome.result:
        words += (
            f" On disk, ours takes 1/{theirs.ratio() / ours.ratio():.2f} of the time of {NAMES[PEER]} "
            f"{theirs.outcome.version or ''}, both beside the resident one."
        )
    return words


def _draw(path: Path, reference: Outcome, found: Sequence[Paired], environment: Environment) -> Path:
    shown = [paired for paired in found if paired.outcome.result is not None]
    names = [_way_of(reference), *(_way_of(paired.outcome) for paired in shown)]
    figure, axes = new_figure(2, "Training steps with clipping and AdamW")
    ratios = [1.0, *(paired.ratio() for paired in shown)]
    bars(axes[0], names, ratios, "time of a step beside the resident one", "{:.2f}")
    level_line(axes[0], MAXIMUM_RATIO, f"{MAXIMUM_RATIO:.2f}")
    peaks = [outcome.peaks[STEPS] / 2**20 for outcome in (reference, *(paired.outcome for paired in shown))]
    bars(axes[1], names, peaks, "peak memory, MiB")
    level_line(axes[1], reference.moments[FLOOR] / 2**20, "interpreter and torch alone")
    return save(figure, path, environment)


# --- larger than memory -------------------------------------------------------------------------------------------


def _run_large(
    arguments: argparse.Namespace, shape: Shape, folder: Path, environment: Environment, limits: Limits
) -> int:
    ways = [LARGE, *([PEER] if PEER in arguments.ways else [])]
    rungs = [_rung(way, shape, folder, 0, arguments.peer_keeps) for way in ways]
    # In the first of its turns a way makes the files of its moments, which it does once.
    if arguments.alone:
        ours, *others = run_apart(rungs, arguments.pairs, turns=STEPS_ALONE, warmup=1)
    else:
        ours, *others = run_in_turn(rungs, arguments.pairs, warmup=1)
    theirs = others[0] if others else None
    if theirs is not None and theirs.result is not None and ours.result is not None:
        theirs.ratio = beside(ours, theirs)[0]
    return publish(
        arguments,
        environment,
        sections=[large_table(ours, theirs, shape, limits, alone=arguments.alone)],
        outcomes=[ours, *others],
        broken=broken_large(ours, theirs),
        draw=lambda path: _draw_large(path, ours, theirs, shape, environment),
        limits=limits,
        facts=_facts(arguments),
    )


def broken_large(ours: Outcome, theirs: Outcome | None) -> list[str]:
    """What must hold and does not, one line each."""
    outcomes = [ours] if theirs is None else [ours, theirs]
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    if broken:
        return broken
    losses = [ours.result["first"]["loss"], *(step["loss"] for step in ours.steps)] if ours.result else []
    if not all(map(math.isfinite, losses)):
        broken.append("losses must be numbers")
    if ours.peak_bytes > MAXIMUM_LARGE_BYTES:
        broken.append(f"at most {MAXIMUM_LARGE_BYTES / 2**30:.0f} GiB, takes {ours.peak_bytes / 2**30:.2f} GiB")
    if theirs is not None and theirs.result is not None:
        broken += _broken_beside(*beside(ours, theirs))
    return broken


def _broken_beside(speedup: float, share: float) -> list[str]:
    """What must hold beside DeepSpeed, at any size, and does not."""
    broken = []
    if not speedup >= MINIMUM_SPEEDUP:
        broken.append(f"at least {MINIMUM_SPEEDUP} times as fast as {NAMES[PEER]}, is {speedup:.2f}")
    if not share <= MAXIMUM_MEMORY_SHARE:
        broken.append(f"at most {MAXIMUM_MEMORY_SHARE:.2f} of the memory of {NAMES[PEER]}, takes {share:.2f}")
    return broken


def _draw_large(path: Path, ours: Outcome, theirs: Outcome | None, shape: Shape, environment: Environment) -> Path:
    figure, axes = new_figure(2, f"{shape.parameters / 1e9:.2f} billion parameters, gradients and moments on disk")
    shown = [ours] if theirs is None or theirs.result is None else [ours, theirs]
    names = ["OffloadModel", "DeepSpeed"][: len(shown)]
    at_rest = BYTES_AT_REST * shape.parameters / 2**30
    memory = [outcome.peaks[STEPS] / 2**30 for outcome in shown]
    bars(axes[0], ["at rest", *names], [at_rest, *memory], "GiB in memory, and in files", "{:.2f}")
    seconds = [statistics.median(step["seconds"] for step in outcome.steps) for outcome in shown]
    bars(axes[1], names, seconds, "seconds of a step", "{:.0f}")
    return save(figure, path, environment)
