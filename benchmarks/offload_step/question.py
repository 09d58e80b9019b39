"""What does streaming a model from disk cost in time, what does the disk give, and does the peak grow with the shards?

One rung takes steps of the resident and of the streamed model in turn, and gives the ratio of their times and the share
of the streamed step that was spent waiting. The other rungs stream models of more and more shards: once the same layers
cut finer, once deeper models out of the same shards.

glibc keeps freed blocks in its heap, and the more often blocks of many sizes come and go, the more it keeps: that grows
with the number of shards although nothing that is in use does. The rungs for the peak therefore run with a fixed
``MALLOC_MMAP_THRESHOLD_``, which gives large blocks back at once and costs time; a last rung shows the deepest model
under the allocator as it comes. Times are always taken under the allocator as it comes.

Three more rungs look at the ends of the scale. With a slot for each shard and homes in memory nothing moves, and what
is left is the price of the engine. With few rows the disk is all that counts, and passes are measured against a plain
read of the same files: without gradients for the weights, where only reads compete, and with them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, filesystem_of, here
from benchmarks.frame.limits import LIMIT_HEADER, Limits, limit_cells, measure_limits
from benchmarks.frame.plot import COLOURS, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.frame.table import markdown_table, mebibytes
from benchmarks.frame.work import block_flops
from benchmarks.offload_step.steps import FLOOR, Shape

__all__ = ["add_arguments", "broken_bounds", "run"]

MAXIMUM_RATIO = 1.05
MAXIMUM_ENGINE_RATIO = 1.02
MINIMUM_DISK_SHARE = 0.90
MAXIMUM_WAIT_SHARE = 0.05
MAXIMUM_GROWTH = 1.05  # of what the engine holds, and of the peak above torch, from the fewest to the most shards
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MEASURE = "benchmarks.offload_step.steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes, the number of pairs, and where homes are."""
    parser.add_argument("--dim", type=int, default=512, metavar="N", help="channels, a multiple of 64")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="rows of the batch")
    parser.add_argument("--positions", type=int, default=64, metavar="N", help="tokens of a row")
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[4, 8, 16], metavar="N", help="each a multiple of all before"
    )
    parser.add_argument("--pairs", type=int, default=9, metavar="N", help="interleaved pairs of steps")
    parser.add_argument("--boundary-bytes", type=int, default=16 << 20, metavar="N", help="activations kept in memory")
    parser.add_argument(
        "--width", type=int, default=4096, metavar="N", help="channels of the layers that wait for disk"
    )
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")


def run(arguments: argparse.Namespace) -> int:
    """Runs the rungs and prints the tables; 0 if the bounds at the head of this module hold."""
    if arguments.dim < 64 or arguments.dim % 64:
        raise ValueError(f"expected a multiple of 64 channels, got dim={arguments.dim}")
    shards = arguments.shards
    if min(shards) < 1 or any(larger % smaller or larger == smaller for smaller, larger in itertools.pairwise(shards)):
        raise ValueError(f"expected numbers of shards, each a multiple of the one before, got shards={shards}")
    for name in ("rows", "positions", "pairs", "width"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"expected at least 1, got {name}={getattr(arguments, name)}")
    environment = here()
    print("\n".join(environment.lines()))
    arguments.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offload-step-", dir=arguments.home) as home:
        print(f"homes    {home} ({filesystem_of(Path(home))})", flush=True)
        limits = measure_limits(Path(home))
        outcomes = run_rungs(_rungs(arguments, home))
    outcomes, engine, streams = outcomes[:-3], outcomes[-3], outcomes[-2:]
    timed, finer, deeper = outcomes[0], outcomes[1 : 1 + len(shards)], outcomes[1 + len(shards) : -1]
    broken = broken_bounds(timed, finer, deeper) + broken_speeds(engine, streams)
    if outcomes[-1].failure:
        broken.append(f"{outcomes[-1].rung.name}: {outcomes[-1].failure}")
    return publish(
        arguments,
        environment,
        sections=[
            time_table([timed, engine], limits),
            disk_table(streams, limits),
            _peak_table(outcomes[1:], limits),
        ],
        outcomes=[*outcomes, engine, *streams],
        broken=broken,
        draw=lambda path: _draw(path, timed, finer, deeper, environment),
        limits=limits,
        facts=[("homes", f"a directory on {filesystem_of(arguments.home)}")],
        may_fail=[outcomes[-1], engine, *streams],
    )


def _rungs(arguments: argparse.Namespace, home: str) -> list[Rung]:
    def shape(shards: int, blocks: int) -> dict[str, int]:
        sizes = {name: getattr(arguments, name) for name in ("dim", "rows", "positions", "boundary_bytes")}
        return asdict(Shape(shards=shards, blocks=blocks, **sizes))

    timed = {"shape": shape(8, 1), "home": home, "pairs": arguments.pairs, "warmup": 2}
    rungs = [Rung("time, 8 shards", f"{MEASURE}:time_pairs", timed)]
    layers = max(arguments.shards)
    for name, blocks in (
        (f"{layers} layers", {shards: layers // shards for shards in arguments.shards}),
        ("1 layer each", dict.fromkeys(arguments.shards, 1)),
    ):
        for shards, count in blocks.items():
            # A peak is a maximum over visits, of what happens to be in flight: deeper models get no more of them.
            steps = 2 if count > 1 else 2 * layers // shards
            settings = {"shape": shape(shards, count), "home": home, "steps": steps}
            rungs.append(Rung(f"{name}, {shards} shards", f"{MEASURE}:peak", settings, GIVE_BACK))
    deepest = rungs[-1]
    rungs.append(Rung(f"{deepest.name}, allocator as it comes", deepest.target, deepest.arguments))
    rungs.append(Rung("all in slots", f"{MEASURE}:time_pairs", {**timed, "home": "cpu", "slots": 8}))
    for name, train in (("disk, inputs take gradients", False), ("disk, weights take gradients", True)):
        sizes = {"width": arguments.width, "layers": 32, "shards": 16, "rows": 1}
        settings = {"home": f"{home}/{train}", "pairs": arguments.pairs, "direct": True, "train": train, **sizes}
        rungs.append(Rung(name, "benchmarks.offload_step.bandwidth:stream", settings))
    return rungs


def _ratio(timed: Outcome) -> float:
    return float(statistics.median(step["ratio"] for step in timed.steps))


def _wait_share(timed: Outcome) -> float:
    return float(sum(step["waited"] for step in timed.steps) / sum(step["streamed"] for step in timed.steps))


def _above_torch(outcome: Outcome) -> int:
    return outcome.peaks["steps"] - outcome.moments[FLOOR]


def _least_seconds(outcome: Outcome, limits: Limits) -> float:
    """What the machine needs at the least for a step of a rung, the streamed one if there are two.

    A forward and a backward with nothing recomputed; and each parameter read from its file, and its gradient written.
    """
    shape = Shape(**outcome.rung.arguments["shape"])
    tokens, blocks = shape.rows * shape.positions, shape.shards * shape.blocks
    on_disk = 0 if outcome.rung.arguments["home"] == "cpu" else _model_bytes(outcome) / 2
    flops = 3 * blocks * block_flops(shape.dim, tokens, shape.positions)
    return limits.step_seconds(flops=flops, read_bytes=on_disk, written_bytes=on_disk)


def time_table(outcomes: Sequence[Outcome], limits: Limits) -> str:
    """Seconds of steps, resident and streamed in turn, beside what ``model.estimate()`` says."""
    header = ["rung", "parameters", "tokens", "resident", "streamed", "median ratio of pairs", "waiting", "predicted"]
    header += LIMIT_HEADER
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, f"failed: {outcome.failure}", *[""] * (len(header) - 2)])
            continue
        ratios = sorted(step["ratio"] for step in outcome.steps)
        rows.append(
            [
                outcome.rung.name,
                f"{outcome.result['parameters'] / 1e6:.0f} M",
                f"{outcome.result['tokens']:,}",
                *(
                    f"{statistics.median(step[way] for step in outcome.steps):.2f} s"
                    for way in ("resident", "streamed")
                ),
                f"{_ratio(outcome):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                f"{_wait_share(outcome):.1%}",
                f"{outcome.result['predicted']:.2f} s",
                *limit_cells(
                    statistics.median(step["streamed"] for step in outcome.steps), _least_seconds(outcome, limits)
                ),
            ]
        )
    return markdown_table(header, rows)


def disk_table(outcomes: Sequence[Outcome], limits: Limits) -> str:
    """GB/s of streamed passes beside those of plain reads of the same files."""
    header = ["rung", "files", "plain, direct", "plain, cached", "loaded", "stored", "loaded / faster plain", "s/step"]
    header += LIMIT_HEADER
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, f"failed: {outcome.failure}", *[""] * (len(header) - 2)])
            continue
        shares = sorted(step["share"] for step in outcome.steps)
        speeds = ("plain_direct", "plain_cached", "streamed", "stored")
        predicted = outcome.result["predicted"]
        median = statistics.median(step["seconds"] for step in outcome.steps)
        read, written = (
            1e9 * statistics.median(step[name] * step["seconds"] for step in outcome.steps)
            for name in ("streamed", "stored")
        )
        seconds = f"{median:.2f}"
        rows.append(
            [
                outcome.rung.name,
                mebibytes(outcome.result["bytes"]),
                *(f"{statistics.median(step[name] for step in outcome.steps):.2f}" for name in speeds),
                f"{_disk_share(outcome):.1%} ({shares[0]:.0%} to {shares[-1]:.0%})",
                seconds if predicted is None else f"{seconds} (predicted {predicted:.2f})",
                *limit_cells(median, limits.step_seconds(read_bytes=read, written_bytes=written)),
            ]
        )
    return markdown_table(header, rows)


def _disk_share(stream: Outcome) -> float:
    return float(statistics.median(step["share"] for step in stream.steps))


def broken_speeds(engine: Outcome, streams: Sequence[Outcome]) -> list[str]:
    """What must hold of the engine alone and of the disk, and does not. Writes compete with reads, so only the first of
    ``streams`` is held to the bandwidth of reads."""
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in (engine, *streams) if outcome.failure]
    if broken:
        return broken
    if not _ratio(engine) <= MAXIMUM_ENGINE_RATIO:
        broken.append(f"all in slots / resident must be at most {MAXIMUM_ENGINE_RATIO:.2f}, is {_ratio(engine):.3f}")
    if any(step["loads"] for step in engine.steps):
        broken.append("with a slot for each shard nothing must be loaded, but something was")
    if not _disk_share(streams[0]) >= MINIMUM_DISK_SHARE:
        broken.append(
            f"a streamed pass must get {MINIMUM_DISK_SHARE:.0%} of what a plain read gets from the disk, gets "
            f"{_disk_share(streams[0]):.1%}"
        )
    return broken


def _peak_table(outcomes: Sequence[Outcome], limits: Limits) -> str:
    header = ["rung", "parameters and gradients", "held by the engine", "peak above torch", "whole peak", "s/step"]
    header += LIMIT_HEADER
    rows = []
    for outcome in outcomes:
        if outcome.result is None:
            rows.append([outcome.rung.name, f"failed: {outcome.failure}", *[""] * (len(header) - 2)])
            continue
        rows.append(
            [
                outcome.rung.name,
                mebibytes(_model_bytes(outcome)),
                mebibytes(_held(outcome)),
                mebibytes(_above_torch(outcome)),
                mebibytes(outcome.peaks["steps"]),
                f"{statistics.median(step['seconds'] for step in outcome.steps):.2f}",
                *limit_cells(
                    statistics.median(step["seconds"] for step in outcome.steps), _least_seconds(outcome, limits)
                ),
            ]
        )
    return markdown_table(header, rows)


def broken_bounds(timed: Outcome, finer: Sequence[Outcome], deeper: Sequence[Outcome]) -> list[str]:
    """What must hold and does not, one line each."""
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in (timed, *finer, *deeper) if outcome.failure]
    if broken:
        return broken
    if not _ratio(timed) <= MAXIMUM_RATIO:
        broken.append(f"streamed / resident must be at most {MAXIMUM_RATIO:.2f}, is {_ratio(timed):.3f}")
    if not _wait_share(timed) < MAXIMUM_WAIT_SHARE:
        broken.append(f"waiting must be below {MAXIMUM_WAIT_SHARE:.0%} of the step, is {_wait_share(timed):.1%}")
    for outcomes in (finer, deeper):
        names = f"{outcomes[0].rung.name} to {outcomes[-1].rung.name}"
        held = [_held(outcomes[0]), _held(outcomes[-1])]
        if held[1] > MAXIMUM_GROWTH * held[0]:
            broken.append(f"what the engine holds must not grow, but from {names} it does: {_from_to(held)}")
        peaks = [_above_torch(outcomes[0]), _above_torch(outcomes[-1])]
        if peaks[1] > MAXIMUM_GROWTH * peaks[0]:
            broken.append(f"the peak must not grow, but from {names} it does: {_from_to(peaks)}")
    return broken


def _held(outcome: Outcome) -> int:
    """Peak of what the engine itself holds on the compute device."""
    return int((outcome.result or {})["statistics"]["peak_device_bytes"])


def _model_bytes(outcome: Outcome) -> int:
    """Parameters and gradients."""
    return 8 * int((outcome.result or {})["parameters"])


def _from_to(sizes: Sequence[int]) -> str:
    return f"{mebibytes(sizes[0])} to {mebibytes(sizes[1])}"


def _draw(
    path: Path, timed: Outcome, finer: Sequence[Outcome], deeper: Sequence[Outcome], environment: Environment
) -> Path:
    shards = [outcome.rung.arguments["shape"]["shards"] for outcome in finer]
    figure, axes = new_figure(2, f"Streaming from disk: {_ratio(timed):.2f}x the time of the resident model")
    for k, way in enumerate(("resident", "streamed")):
        axes[0].plot([step[way] for step in timed.steps], marker="o", markersize=3, color=COLOURS[k], label=way)
    axes[0].set_title("seconds a step, pair by pair", fontsize=10)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, frameon=False)
    for k, (outcomes, name) in enumerate(((finer, "the same layers"), (deeper, "one layer a shard"))):
        peaks = [outcome.peaks["steps"] / 2**20 for outcome in outcomes]
        axes[1].plot(shards, peaks, marker="o", color=COLOURS[k + 2], label=name)
    axes[1].set_title("peak memory, MiB, over shards", fontsize=10)
    axes[1].set_xticks(shards)
    axes[1].set_ylim(bottom=0)
    level_line(axes[1], finer[0].moments[FLOOR] / 2**20, "interpreter and torch alone")
    return save(figure, path, environment)
