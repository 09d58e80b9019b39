"""``gradcache-batch``: the largest exact contrastive batch in fixed memory, and what a step and its chunks cost.

Four parts. *Time*: one model, one batch, the same chunks; each method takes its steps in turn with the package
GradCache over ``torch.utils.checkpoint``. *Memory*: batches double until a cap on the process's memory refuses one.
*Chunks*: one batch in more and more chunks, over a model on disk, where the bytes that move are what a step costs.
*Loss*: the loss of a very large batch by itself.

Times are measured under the default allocator. glibc keeps much of what was freed, so peaks are those of further
processes with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns freed tensors at once and takes time.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.gradcache_batch.methods import Shape
from benchmarks.harness.benchmark import Benchmark, Plan, Report, Run
from benchmarks.harness.case import Case, Outcome, failures
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.harness.table import Columns, at_least, at_most, case_table, limit_columns, mebibytes, reasons, spread

MAXIMUM_RATIO = {
    "ours, chunks apart": 0.85,
    "ours over OffloadModel, chunks apart": 0.85,
    "ours": 0.55,
    "ours over OffloadModel": 0.55,
}
MAXIMUM_PEAK_RATIO = 1.0  # of the peak above torch, to the reference's
MAXIMUM_DIFFERENCE = 1e-6  # of gradients, to the reference's
MAXIMUM_LOSS_BYTES = 1 << 30
MINIMUM_SPEEDUP = 5.0  # over chunk by chunk, at the most chunks
REFERENCE = "upstream GradCache"
KEPT = f"{REFERENCE}, nothing checkpointed"
CHUNK_BY_CHUNK = "OffloadModel, chunk by chunk"
FUSED = "ours over OffloadModel"
LOSS_WIDTH = 256
METHODS = "benchmarks.gradcache_batch.methods"
PEERS = {REFERENCE: "gradcache", KEPT: "gradcache", "sentence-transformers": "sentence-transformers"}
TIMED = (REFERENCE, KEPT, *MAXIMUM_RATIO)
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
    kept: int = option(440, "MiB kept between the passes, layers in memory")
    graphs: int = option(690, "MiB of graphs kept over an OffloadModel", least=0)
    rounds: int = option(3, "pairs of steps for each method")
    limit: int = option(96, "MiB that a method may take, of the part memory")
    most: int = option(4096, "pairs at which batches stop growing")
    loss_rows: int = option(65_536, "rows for the loss by itself")
    small_dim: int = option(128, "channels of the part memory", least=64, multiple=64)
    chunks: tuple[int, ...] = option((1, 4, 16, 64, 256), "numbers of chunks, of the part chunks")
    chunked_dim: int = option(512, "channels of the part chunks", least=64, multiple=64)


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: time, peaks, growing batches, chunks, the loss."""

    def case(method: str, function: str, shape: Shape, environment: Mapping[str, str], **more: object) -> Case:
        arguments = {"method": method, "shape": asdict(shape), "home": folder, **more}
        return Case(method, f"{METHODS}:{function}", arguments, environment, PEERS.get(method, ""))

    names = ("vocabulary", "positions", "dim", "depth", "pairs", "chunk", "kept", "graphs")
    timed = Shape(**{name: getattr(settings, name) for name in names}, together=1024)
    small = Shape(4096, 16, settings.small_dim, 4, pairs=16, chunk=16, kept=settings.limit // 4, graphs=0, together=8)
    pairs = max(settings.chunks) // 2 or 1
    cut = Shape(4096, 8, settings.chunked_dim, 4, pairs=pairs, chunk=1, kept=64, graphs=64, together=64)
    grown = {"limit_mebibytes": settings.limit, "most_pairs": settings.most}
    laddered = {"chunks": list(settings.chunks), "steps": 2}
    loss = {"rows": settings.loss_rows, "width": LOSS_WIDTH}
    yield Group("time", [case(method, "in_turn", timed, {}) for method in TIMED], "pairs", settings.rounds, warmup=1)
    yield Group("peaks", [case(method, "in_turn", timed, GIVE_BACK) for method in TIMED], turns=2)
    yield Group("growing", [case(method, "growing", small, GIVE_BACK, **grown) for method in GROWING])
    yield Group("chunks", [case(method, "ladder", cut, {}, **laddered) for method in CHUNKED])
    yield Group("loss", [Case("loss", f"{METHODS}:loss_alone", loss, GIVE_BACK)])


def report(run: Run[Any]) -> Report:
    """A table for each part."""
    groups, limits, settings = run.groups, run.limits, run.settings
    reference = groups["time"][0]
    held = {outcome.name: mebibytes(outcome.above()) for outcome in groups["peaks"] if outcome.result is not None}
    shape = _shape(reference)
    parameters = next((o.done["parameters"] for o in groups["time"] if o.result), 0)
    counts = settings.chunks

    def largest(outcome: Outcome) -> float:
        return limits.step_seconds(flops=replace(_shape(outcome), pairs=outcome.done["pairs"]).training_flops)

    def last(outcome: Outcome) -> float:
        return float(outcome.steps[-1]["seconds"]) if outcome.steps else math.nan

    def loads(outcome: Outcome) -> list[int]:
        return [found for count in counts if (found := outcome.done["bytes_loaded"][str(count)]) is not None]

    def chunk_seconds(outcome: Outcome) -> float:
        # A model on disk loads at least what the fewest chunks load.
        work = _shape(outcome).training_flops
        return limits.step_seconds(flops=work, read_bytes=min(loads(outcome), default=0))

    times = {
        "s/step": lambda o: f"{o.median():.2f}",
        "median ratio of pairs": lambda o: spread(o.ratios()) if o is not reference else "1",
        "of processor time": lambda o: spread(o.ratios("processor")) if o is not reference else "1",
        "peak above torch": lambda o: held.get(o.name, "-"),
        "gradient differs by": lambda o: f"{difference(o, reference):.1e}" if o is not reference else "0",
        **limit_columns(limits, lambda o: limits.step_seconds(flops=shape.training_flops)),
    }
    sizes = {
        "largest batch, pairs": lambda o: f"{o.done['pairs']:,}",
        "s/step there": lambda o: f"{last(o):.2f}",
        "pairs/s": lambda o: f"{o.done['pairs'] / last(o):,.0f}",
        "ended by": lambda o: "memory" if o.done["ended"] else "the end of the benchmark",
        **limit_columns(limits, largest, last),
    }
    chunks: Columns = {
        **{f"{count} chunks, s": lambda o, count=count: f"{seconds_of(o, count):.2f}" for count in counts},
        "bytes loaded a step, fewest to most chunks": lambda o: (
            f"{mebibytes(loads(o)[0])} to {mebibytes(loads(o)[-1])}" if loads(o) else "-"
        ),
        **limit_columns(limits, chunk_seconds, lambda o: seconds_of(o, counts[-1])),
    }
    loss = {
        "representations": lambda o: f"{o.done['rows']:,}",
        "width": lambda o: f"{o.done['width']}",
        "seconds": lambda o: f"{o.done['seconds']:.0f}",
        "memory, representations included": lambda o: mebibytes(_loss_bytes(o)),
        **limit_columns(  # scores, and both gradients
            limits,
            lambda o: limits.step_seconds(flops=3 * 2.0 * o.done["rows"] ** 2 * o.done["width"]),
            lambda o: float(o.done["seconds"]),
        ),
    }
    sections = [
        f"## Time\n\n{parameters / 1e6:.0f} M parameters, {shape.tokens:,} tokens in {2 * shape.pairs} rows of "
        f"{shape.positions}, chunks of {shape.chunk} rows ({shape.chunk * shape.positions} tokens). {REFERENCE!r} is "
        "the package over `torch.utils.checkpoint`. The limit is a forward and a backward with nothing recomputed.",
        case_table(groups["time"], times, "method"),
        f"## Largest exact batch in fixed memory\n\nEach process may take {settings.limit} MiB beyond interpreter, "
        "torch and a step of two pairs.",
        case_table(groups["growing"], sizes, "method"),
        "## Chunks\n\nThe same batch in each column. The distance from the limit is that of the most chunks.",
        case_table(groups["chunks"], chunks, "method"),
        "## The loss alone, by tiles",
        case_table(groups["loss"], loss, "loss"),
        reasons(run.outcomes),
    ]
    return Report(sections, broken_bounds(groups))


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


def _loss_bytes(outcome: Outcome) -> int:
    """Peak bytes of the loss above torch, representations included."""
    return outcome.above() + int(outcome.done["given"])


def broken_bounds(groups: dict[str, list[Outcome]]) -> list[str]:
    """Bounds that do not hold, one line each."""
    broken = failures(outcome for outcomes in groups.values() for outcome in outcomes)
    if broken:
        return broken
    reference, *timed = groups["time"]
    held = {outcome.name: outcome.above() for outcome in groups["peaks"] if outcome.result is not None}
    for outcome in timed if reference.result is not None else ():
        name = outcome.name
        if name in MAXIMUM_RATIO:
            broken += at_most(f"{name}: the ratio of times", outcome.ratio(), MAXIMUM_RATIO[name], "{:.3f}".format)
            peak = held[name] / held[REFERENCE]
            broken += at_most(f"{name}: the ratio of peaks", peak, MAXIMUM_PEAK_RATIO, "{:.3f}".format)
        if outcome.result is not None:
            what = f"{name}: the difference of gradients from the reference's"
            broken += at_most(what, difference(outcome, reference), MAXIMUM_DIFFERENCE, "{:.1e}".format)
    broken += _broken_growth(groups["growing"])
    by_name = {outcome.name: outcome for outcome in groups["chunks"]}
    fused, apart = by_name[FUSED], by_name[CHUNK_BY_CHUNK]
    most = max(step["chunks"] for step in fused.steps)
    longer = seconds_of(apart, most) / seconds_of(fused, most)
    broken += at_least(f"{most} chunks: the speed-up over chunk by chunk", longer, MINIMUM_SPEEDUP)
    if len(set(fused.done["bytes_loaded"].values())) != 1:
        broken.append(f"bytes loaded must not depend on the chunks, are {fused.done['bytes_loaded']}")
    return broken + at_most("memory of the loss", _loss_bytes(groups["loss"][0]), MAXIMUM_LOSS_BYTES, mebibytes)


def _broken_growth(grown: Sequence[Outcome]) -> list[str]:
    """Every method must compute what the first one does, and ours must hold the largest batch."""
    broken = []
    known: dict[str, list[float]] = {}
    done = [outcome for outcome in grown if outcome.result is not None]
    for outcome in done:
        for pairs, mine in outcome.done["sketches"].items():
            apart = _apart(mine, known.setdefault(pairs, mine))
            what = f"{outcome.name}, {pairs} pairs: the difference of gradients"
            broken += at_most(what, apart, MAXIMUM_DIFFERENCE, "{:.1e}".format)
    sizes = {outcome.name: outcome.done["pairs"] for outcome in done}
    if sizes[FUSED] < max(sizes.values()):
        broken.append(f"{FUSED} must hold the largest batch, holds {sizes}")
    return broken


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"tries": 2})
