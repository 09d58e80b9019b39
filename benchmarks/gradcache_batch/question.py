"""How large may a contrastive batch be in fixed memory, exactly, and what do a step and its chunks cost, way by way?

Four parts. *Time*: one model, one batch, the same chunks; each way takes its steps in turn with the package GradCache
over ``torch.utils.checkpoint``, every one in a process of its own. *Memory*: batches double until a limit on the
process's memory refuses one. *Chunks*: one batch in more and more chunks, over a model with its home on disk; there the
bytes that travel are what a step costs. *Loss*: the loss of a very big batch by itself.

Times are taken under the allocator as it comes. glibc keeps much of what was freed, so what a process holds then tells
little of what a way needs; peaks are those of further processes with a fixed ``MALLOC_MMAP_THRESHOLD_``, which gives
tensors back at once, also those of one chunk, and costs time.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, filesystem_of, here
from benchmarks.frame.extra import require
from benchmarks.frame.limits import measure_limits
from benchmarks.frame.pairs import Paired, run_pairs, spread
from benchmarks.frame.plot import COLOURS, level_line, new_figure, save
from benchmarks.frame.report import publish
from benchmarks.frame.rungs import Outcome, Rung, run_rungs
from benchmarks.frame.table import mebibytes
from benchmarks.gradcache_batch.shape import Shape
from benchmarks.gradcache_batch.tables import (
    above_torch,
    chunk_table,
    difference,
    loss_bytes,
    loss_table,
    memory_table,
    seconds_of,
    time_table,
)
from benchmarks.gradcache_batch.ways import PEERS, WAYS

__all__ = ["add_arguments", "broken_bounds", "run"]

MAXIMUM_RATIO = {
    "ours, chunks apart": 0.85,
    "ours over OffloadModel, chunks apart": 0.85,
    "ours": 0.55,
    "ours over OffloadModel": 0.55,
}
MAXIMUM_PEAK_RATIO = 1.0  # of the peak above torch, to the reference's
MAXIMUM_DIFFERENCE = 1e-6  # of gradients, to the reference's
MAXIMUM_LOSS_BYTES = 1 << 30
LOSS_WIDTH = 256
MINIMUM_SPEEDUP = 5.0  # over chunk by chunk, at the most chunks
REFERENCE = "upstream GradCache"
TIMED = (REFERENCE, *MAXIMUM_RATIO)
CHUNK_BY_CHUNK = "OffloadModel, chunk by chunk"
FUSED = "ours over OffloadModel"
GROWING = tuple(way for way in WAYS if way != CHUNK_BY_CHUNK and not way.endswith("chunks apart"))
CHUNKED = (REFERENCE, "ours", CHUNK_BY_CHUNK, FUSED)
MEASURE = "benchmarks.gradcache_batch.steps"
# So that what was freed does not count, neither in peaks nor against the limit; less than a tensor of one chunk has.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the three parts, and how often to measure."""
    time, memory = parser.add_argument_group("time"), parser.add_argument_group("memory and chunks")
    time.add_argument("--dim", type=int, default=768, metavar="N", help="channels, a multiple of 64")
    time.add_argument("--depth", type=int, default=12, metavar="N", help="blocks")
    time.add_argument("--vocabulary", type=int, default=36_000, metavar="N", help="rows of the embedding")
    time.add_argument("--positions", type=int, default=128, metavar="N", help="tokens of a row")
    time.add_argument("--pairs", type=int, default=8, metavar="N", help="pairs of the batch")
    time.add_argument("--chunk", type=int, default=2, metavar="N", help="rows of a chunk")
    time.add_argument("--kept", type=int, default=440, metavar="MiB", help="kept between the passes, layers in memory")
    time.add_argument("--graphs", type=int, default=690, metavar="MiB", help="kept in graphs, over an OffloadModel")
    time.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs of steps for each way")
    memory.add_argument("--limit", type=int, default=96, metavar="MiB", help="memory that a way may take")
    memory.add_argument("--most", type=int, default=4096, metavar="N", help="pairs at which growing ends")
    memory.add_argument("--loss-rows", type=int, default=65_536, metavar="N", help="rows for the loss by itself")
    memory.add_argument("--small-dim", type=int, default=128, metavar="N", help="channels of the limited model")
    memory.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 16, 64, 256], metavar="N", help="their numbers")
    memory.add_argument("--chunked-dim", type=int, default=512, metavar="N", help="channels of the model in chunks")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for the shards")


def run(arguments: argparse.Namespace) -> int:
    """Runs the parts and prints the tables; 0 if the bounds at the head of this module hold."""
    for name in ("depth", "positions", "pairs", "chunk", "rounds", "limit", "most"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"expected at least 1, got {name}={getattr(arguments, name)}")
    for name in ("dim", "small_dim", "chunked_dim"):
        if getattr(arguments, name) < 64 or getattr(arguments, name) % 64:
            raise ValueError(f"expected a multiple of 64 channels, got {name}={getattr(arguments, name)}")
    for package in ("tqdm", *(("matplotlib",) if arguments.plot or arguments.out else ())):
        require(package)
    environment = here()
    print("\n".join(environment.lines()), flush=True)
    arguments.home.mkdir(parents=True, exist_ok=True)
    limits = measure_limits(arguments.home, tries=2)
    with tempfile.TemporaryDirectory(prefix="gradcache-batch-", dir=arguments.home) as home:
        reference, timed = _time(arguments, home)
        peaks = run_rungs([_rung(way, "in_turn", _shape(arguments), home, GIVE_BACK) for way in TIMED], turns=2)
        grown = run_rungs(_growing(arguments, home))
        laddered = run_rungs(_ladders(arguments, home))
    settings = {"rows": arguments.loss_rows, "width": LOSS_WIDTH}
    loss = run_rungs([Rung("loss", f"{MEASURE}:loss_alone", settings, GIVE_BACK)])[0]
    outcomes = [reference, *(paired.outcome for paired in timed), *peaks, *grown, *laddered, loss]
    sections = [
        time_table(_shape(arguments), reference, timed, peaks, limits),
        memory_table(arguments.limit, grown, limits),
        chunk_table(arguments.chunks, laddered, limits),
        loss_table(loss, limits),
    ]
    return publish(
        arguments,
        environment,
        sections=sections,
        outcomes=outcomes,
        broken=broken_bounds(reference, timed, peaks, grown, laddered, loss),
        draw=lambda path: _draw(path, reference, timed, grown, laddered, environment),
        limits=limits,
        facts=[("homes", f"a directory on {filesystem_of(arguments.home)}")],
    )


# --- rungs -----------------------------------------------------------------------------------------------------------


def _rung(
    way: str, function: str, shape: Shape, home: str, environment: dict[str, str] | None = None, **settings: object
) -> Rung:
    return Rung(
        way,
        f"{MEASURE}:{function}",
        {"way": way, "shape": asdict(shape), "home": home, **settings},
        environment=environment or {},
        peer=PEERS.get(way, ""),
    )


def _shape(arguments: argparse.Namespace) -> Shape:
    return Shape(
        vocabulary=arguments.vocabulary,
        positions=arguments.positions,
        dim=arguments.dim,
        depth=arguments.depth,
        pairs=arguments.pairs,
        chunk=arguments.chunk,
        kept_mebibytes=arguments.kept,
        graph_mebibytes=arguments.graphs,
        activation_mebibytes=1024,
    )


def _time(arguments: argparse.Namespace, home: str) -> tuple[Outcome, list[Paired]]:
    shape = _shape(arguments)
    rungs = [_rung(way, "in_turn", shape, home) for way in MAXIMUM_RATIO]
    return run_pairs(_rung(REFERENCE, "in_turn", shape, home), rungs, arguments.rounds)


def _growing(arguments: argparse.Namespace, home: str) -> list[Rung]:
    shape = Shape(
        vocabulary=4096,
        positions=16,
        dim=arguments.small_dim,
        depth=4,
        pairs=16,
        chunk=16,
        kept_mebibytes=arguments.limit // 4,
        graph_mebibytes=0,
        activation_mebibytes=8,
    )
    limits = {"limit_mebibytes": arguments.limit, "most_pairs": arguments.most}
    return [_rung(way, "growing", shape, home, GIVE_BACK, **limits) for way in GROWING]


def _ladders(arguments: argparse.Namespace, home: str) -> list[Rung]:
    shape = Shape(
        vocabulary=4096,
        positions=8,
        dim=arguments.chunked_dim,
        depth=4,
        pairs=max(arguments.chunks) // 2 or 1,
        chunk=1,
        kept_mebibytes=64,
        graph_mebibytes=64,
        activation_mebibytes=64,
    )
    settings = {"chunks": arguments.chunks, "steps": 2}
    return [_rung(way, "ladder", shape, home, **settings) for way in CHUNKED]


# --- what must hold --------------------------------------------------------------------------------------------------


def broken_bounds(
    reference: Outcome,
    timed: Sequence[Paired],
    peaks: Sequence[Outcome],
    grown: Sequence[Outcome],
    laddered: Sequence[Outcome],
    loss: Outcome,
) -> list[str]:
    """What must hold and does not, one line each."""
    outcomes = [reference, *(paired.outcome for paired in timed), *peaks, *grown, *laddered, loss]
    broken = [f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    if broken:
        return broken
    held = {outcome.rung.name: above_torch(outcome) for outcome in peaks if outcome.result is not None}
    for paired in timed if reference.result is not None else ():
        name = paired.outcome.rung.name
        if not paired.ratio() <= MAXIMUM_RATIO[name]:
            limit, found = MAXIMUM_RATIO[name], spread(paired.ratios())
            broken.append(f"{name}: time must be at most {limit:.2f} of the reference's, is {found}")
        apart = difference(paired.outcome, reference)
        if not apart <= MAXIMUM_DIFFERENCE:
            broken.append(f"{name}: gradients must be the reference's, differ by {apart:.1e}")
        peak = held[name] / held[REFERENCE]
        if not peak <= MAXIMUM_PEAK_RATIO:
            broken.append(f"{name}: the peak must be at most the reference's, is {peak:.3f} of it")
    broken += _broken_growth(grown)
    by_name = {outcome.rung.name: outcome for outcome in laddered}
    fused = by_name[FUSED]
    most = max(step["chunks"] for step in fused.steps)
    longer = seconds_of(by_name[CHUNK_BY_CHUNK], most) / seconds_of(fused, most)
    if not longer >= MINIMUM_SPEEDUP:
        broken.append(f"{most} chunks: chunk by chunk must take {MINIMUM_SPEEDUP:g} times as long, takes {longer:.1f}")
    assert fused.result is not None
    if len(set(fused.result["bytes_loaded"].values())) != 1:
        broken.append(f"bytes loaded must not depend on the chunks, are {fused.result['bytes_loaded']}")
    if not loss_bytes(loss) <= MAXIMUM_LOSS_BYTES:
        limit, found = mebibytes(MAXIMUM_LOSS_BYTES), mebibytes(loss_bytes(loss))
        broken.append(f"the loss: must take at most {limit}, takes {found}")
    return broken


def _broken_growth(grown: Sequence[Outcome]) -> list[str]:
    """Every way must compute what the first one does, and ours must hold the largest batch."""
    broken = []
    known: dict[str, list[float]] = {}
    for outcome in grown:
        for pairs, mine in outcome.result["sketches"].items() if outcome.result else ():
            theirs = known.setdefault(pairs, mine)
            apart = math.dist(mine, theirs) / math.hypot(*theirs)
            if not apart <= MAXIMUM_DIFFERENCE:
                broken.append(f"{outcome.rung.name}, {pairs} pairs: gradients differ by {apart:.1e}")
    sizes = {outcome.rung.name: outcome.result["pairs"] for outcome in grown if outcome.result}
    if sizes[FUSED] < max(sizes.values()):
        broken.append(f"{FUSED} must hold the largest batch, holds {sizes}")
    return broken


def _draw(
    path: Path,
    reference: Outcome,
    timed: Sequence[Paired],
    grown: Sequence[Outcome],
    laddered: Sequence[Outcome],
    environment: Environment,
) -> Path:
    figure, axes = new_figure(3, "A contrastive batch in chunks")
    done = [paired for paired in timed if paired.outcome.result and paired.steps]
    names = [paired.outcome.rung.name for paired in done]
    axes[0].bar(range(len(done)), [paired.ratio() for paired in done], color=COLOURS[0])
    axes[0].set_xticks(range(len(done)), [name.replace(" ", "\n") for name in names], fontsize=7)
    axes[0].set_title("time, upstream GradCache is 1", fontsize=10)
    level_line(axes[0], 1.0, REFERENCE)
    sizes = [outcome for outcome in grown if outcome.result]
    axes[1].barh(range(len(sizes)), [(o.result or {})["pairs"] for o in sizes], color=COLOURS[2])
    axes[1].set_yticks(range(len(sizes)), [o.rung.name for o in sizes], fontsize=7)
    axes[1].set_xscale("log", base=2)
    axes[1].invert_yaxis()
    axes[1].set_title("largest batch, pairs", fontsize=10)
    for k, outcome in enumerate(o for o in laddered if o.result):
        counts = sorted({step["chunks"] for step in outcome.steps})
        seconds = [seconds_of(outcome, count) for count in counts]
        axes[2].plot(counts, seconds, marker="o", color=COLOURS[k], label=outcome.rung.name)
    axes[2].set_xscale("log", base=2)
    axes[2].set_yscale("log")
    axes[2].set_title("seconds a step, over chunks", fontsize=10)
    axes[2].legend(fontsize=7, frameon=False)
    return save(figure, path, environment)
