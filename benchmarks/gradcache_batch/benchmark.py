"""``gradcache-batch``: the largest exact contrastive batch in fixed memory, and what a step and its chunks cost.

Three parts. *Time*: one model, one batch, the same chunks; each method takes its steps in turn with the package
GradCache over ``torch.utils.checkpoint``. *Memory*: batches double until a cap on the process's memory refuses one.
*Chunks*: one batch in more and more chunks, over a model on disk, where the bytes that move are what a step costs.

Times are measured under the default allocator. glibc keeps much of what was freed, so peaks are those of further
processes with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns freed tensors at once and takes time.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gradcache_batch.methods import Shape
from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import Columns, at_least, at_most, case_table, mebibytes, spread

MAXIMUM_RATIO = 0.55  # of the time of ours over OffloadModel, to the reference's
MAXIMUM_PEAK_RATIO = 1.0  # of the peak above torch, to the reference's
MAXIMUM_DIFFERENCE = 1e-6  # of gradients, to the reference's
MINIMUM_SPEEDUP = 5.0  # over chunk by chunk, at the most chunks
REFERENCE = "upstream GradCache"
KEPT = f"{REFERENCE}, nothing checkpointed"
CHUNK_BY_CHUNK = "OffloadModel, chunk by chunk"
FUSED = "ours over OffloadModel"
METHODS = "benchmarks.gradcache_batch.methods"
PEERS = {REFERENCE: "gradcache", KEPT: "gradcache", "sentence-transformers": "sentence-transformers"}
TIMED = (REFERENCE, KEPT, "ours", FUSED)
GROWING = ("plain torch", "torch.utils.checkpoint", *PEERS, "ours", FUSED)
CHUNKED = (REFERENCE, "ours", CHUNK_BY_CHUNK, FUSED)
# Below the size of a tensor of one chunk, so that freed tensors count neither in peaks nor against the cap.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


@dataclass(frozen=True)
class Settings:
    """Sizes of the parts, and how often to measure."""

    dim: int = option(768, "channels, of the part time", least=64, multiple=64)
    depth: int = option(12, "blocks")
    vocabulary: int = option(36_000, "rows of the embedding")
    positions: int = option(128, "tokens of a row")
    pairs: int = option(8, "pairs of the batch")
    chunk: int = option(2, "rows of a chunk")
    kept: int = option(440, "MiB of boundaries kept over an OffloadModel")
    graphs: int = option(690, "MiB of graphs kept over an OffloadModel", least=0)
    rounds: int = option(3, "pairs of steps for each method")
    limit: int = option(96, "MiB that a method may take, of the part memory")
    most: int = option(4096, "pairs at which batches stop growing")
    small_dim: int = option(128, "channels of the part memory", least=64, multiple=64)
    chunks: tuple[int, ...] = option((1, 4, 16, 64, 256), "numbers of chunks, of the part chunks")
    chunked_dim: int = option(512, "channels of the part chunks", least=64, multiple=64)


def measure(run: Run) -> None:
    """Runs the groups of cases: times, peaks, growing batches, numbers of chunks."""
    settings = run.settings

    def cases(methods: Sequence[str], function: str, shape: Shape, *environment: Any, **how: Any) -> list[Case]:
        target, how = f"{METHODS}:{function}", {"shape": asdict(shape), **how}
        return [
            Case(method, target, {"method": method, **how}, *(environment or ({},)), PEERS.get(method, ""))
            for method in methods
        ]

    names = ("vocabulary", "positions", "dim", "depth", "pairs", "chunk", "kept", "graphs")
    timed = Shape(**{name: getattr(settings, name) for name in names}, together=1024)
    small = Shape(4096, 16, settings.small_dim, 4, pairs=16, chunk=16, kept=settings.limit // 4, graphs=0, together=8)
    pairs = max(settings.chunks) // 2 or 1
    cut = Shape(4096, 8, settings.chunked_dim, 4, pairs=pairs, chunk=1, kept=64, graphs=64, together=64)
    grown = {"limit_mebibytes": settings.limit, "most_pairs": settings.most}
    run.group("time", cases(TIMED, "in_turn", timed), "pairs", turns=settings.rounds, warmup=1)
    run.group("peaks", cases(TIMED, "in_turn", timed, GIVE_BACK), turns=2)
    run.group("growing", cases(GROWING, "growing", small, GIVE_BACK, **grown))
    run.group("chunks", cases(CHUNKED, "ladder", cut, chunks=list(settings.chunks), steps=2))


def report(run: Run) -> list[str]:
    """A table for each part."""
    groups, counts = run.groups, run.settings.chunks
    reference = groups["time"][0]
    held = {outcome.name: mebibytes(outcome.above()) for outcome in groups["peaks"] if outcome.result is not None}
    shape = _shape(reference)
    parameters = next((o.result["parameters"] for o in groups["time"] if o.result), 0)

    def last(outcome: Outcome) -> float:
        return float(outcome.steps[-1]["seconds"]) if outcome.steps else math.nan

    def loads(outcome: Outcome) -> list[int]:
        return [found for count in counts if (found := outcome.result["bytes_loaded"][str(count)]) is not None]

    times = {
        "s/step": lambda o: f"{o.median():.2f}",
        "median ratio of pairs": lambda o: spread(o.ratios()) if o is not reference else "1",
        "of processor time": lambda o: spread(o.ratios("processor")) if o is not reference else "1",
        "peak above torch": lambda o: held.get(o.name, "-"),
        "gradient differs by": lambda o: f"{difference(o, reference):.1e}" if o is not reference else "0",
    }
    sizes = {
        "largest batch, pairs": lambda o: f"{o.result['pairs']:,}",
        "s/step there": lambda o: f"{last(o):.2f}",
        "pairs/s": lambda o: f"{o.result['pairs'] / last(o):,.0f}",
        "ended by": lambda o: "memory" if o.result["ended"] else "the end of the benchmark",
    }
    chunks: Columns = {
        **{f"{count} chunks, s": lambda o, count=count: f"{seconds_of(o, count):.2f}" for count in counts},
        "bytes loaded a step, fewest to most chunks": lambda o: (
            f"{mebibytes(loads(o)[0])} to {mebibytes(loads(o)[-1])}" if loads(o) else "-"
        ),
    }
    return [
        f"## Time\n\n{parameters / 1e6:.0f} M parameters, {shape.tokens:,} tokens in {2 * shape.pairs} rows of "
        f"{shape.positions}, chunks of {shape.chunk} rows ({shape.chunk * shape.positions} tokens). {REFERENCE!r} is "
        "the package over `torch.utils.checkpoint`.",
        case_table(groups["time"], times, "method"),
        f"## Largest exact batch in fixed memory\n\nEach process may take {run.settings.limit} MiB beyond "
        "interpreter, torch and a step of two pairs.",
        case_table(groups["growing"], sizes, "method"),
        "## Chunks\n\nThe same batch in each column.",
        case_table(groups["chunks"], chunks, "method"),
    ]


def _shape(outcome: Outcome) -> Shape:
    return Shape(**outcome.case.arguments["shape"])


def difference(mine: Outcome, theirs: Outcome) -> float:
    """Relative difference of two gradients, by their sketches; NaN where there are not two."""
    if mine.result is None or theirs.result is None:
        return float("nan")
    return _apart(mine.result["sketch"], theirs.result["sketch"])


def _apart(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return math.dist(mine, theirs) / math.hypot(*theirs)


def seconds_of(outcome: Outcome, chunks: int) -> float:
    """Median of the steps with so many chunks."""
    found = [step["seconds"] for step in outcome.steps if step["chunks"] == chunks]
    return statistics.median(found) if found else float("nan")


def bounds(run: Run) -> list[str]:
    """Times, peaks and gradients beside the reference; the largest batch; chunks."""
    broken: list[str] = []
    reference, *timed = run.groups["time"]
    held = {outcome.name: outcome.above() for outcome in run.groups["peaks"] if outcome.result is not None}
    for outcome in timed if reference.result is not None else ():
        name = outcome.name
        if name == FUSED:
            broken += at_most(f"{name}: the ratio of times", outcome.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
            peak = held[name] / held[REFERENCE]
            broken += at_most(f"{name}: the ratio of peaks", peak, MAXIMUM_PEAK_RATIO, "{:.3f}".format)
        if outcome.result is not None:
            what = f"{name}: the difference of gradients from the reference's"
            broken += at_most(what, difference(outcome, reference), MAXIMUM_DIFFERENCE, "{:.1e}".format)
    known: dict[str, list[float]] = {}  # sketch of the gradient by number of pairs, of the first method
    sizes: dict[str, int] = {}
    for outcome in run.groups["growing"]:
        if outcome.result is not None:
            sizes[outcome.name] = outcome.result["pairs"]
            for pairs, mine in outcome.result["sketches"].items():
                what = f"{outcome.name}, {pairs} pairs: the difference of gradients"
                broken += at_most(
                    what, _apart(mine, known.setdefault(pairs, mine)), MAXIMUM_DIFFERENCE, "{:.1e}".format
                )
    if sizes[FUSED] < max(sizes.values()):
        broken.append(f"{FUSED} must hold the largest batch, holds {sizes}")
    fused, apart = run.find(FUSED, "chunks"), run.find(CHUNK_BY_CHUNK, "chunks")
    most = max(fused.values("chunks"))
    longer = seconds_of(apart, most) / seconds_of(fused, most)
    broken += at_least(f"{most} chunks: the speed-up over chunk by chunk", longer, MINIMUM_SPEEDUP)
    if len(set(fused.result["bytes_loaded"].values())) != 1:
        broken.append(f"bytes loaded must not depend on the chunks, are {fused.result['bytes_loaded']}")
    return broken


def claims(run: Run) -> list[Claim]:
    """Ours on disk, beside the package over ``torch.utils.checkpoint`` in memory."""
    reference = run.find(REFERENCE, "peaks")
    tokens, parameters = _shape(reference).tokens, reference.result["parameters"] / 1e6
    batch = f"gradients of a contrastive batch of {tokens:,} tokens, {parameters:.0f} M parameters"
    beside = "all in memory, GradCache over `torch.utils.checkpoint`"
    memory = run.find(FUSED, "peaks").above() / reference.above()
    ratios = run.find(FUSED, "time").ratios()
    return [Claim(f"{batch}; parameters and gradients on disk", beside, ratios, memory, " above torch")]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
