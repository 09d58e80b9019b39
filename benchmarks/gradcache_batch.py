"""``gradcache-batch``: the largest exact contrastive batch in fixed memory, and what a step and its chunks cost.

Three parts. *Time*: one model, one batch, the same chunks; each method takes its steps in turn with the package
GradCache over ``torch.utils.checkpoint``. *Memory*: batches double until a cap on the process's memory refuses one.
*Chunks*: one batch in more and more chunks, over a model on disk, where the bytes that move are what a step costs.

A method that recomputes does so layer by layer, and a method that cuts the batch cuts it into the same chunks; the one
exception is GradCache as most people run it, without ``torch.utils.checkpoint``.

Times are measured under the default allocator. glibc keeps much of what was freed, so peaks are those of further
processes with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns freed tensors at once and takes time.
"""

import importlib
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, LOST, Case, Outcome, told_by
from benchmarks.harness.io_counters import measure as take
from benchmarks.harness.memory import cap_memory, memory_of
from benchmarks.harness.settings import option
from benchmarks.harness.table import Columns, at_least, at_most, case_table, mebibytes, spread
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import CHUNK_BY_CHUNK, GRADCACHE, SENTENCE_TRANSFORMERS, UPSTREAM, WHOLE, Texts
from benchmarks.models.methods import DISK, METHODS, RESIDENT, STEPS, Method, take_turns

MAXIMUM_RATIO = 0.55  # of the time of ours over OffloadModel, to the reference's
MAXIMUM_PEAK_RATIO = 1.0  # of the peak above torch, to the reference's
MAXIMUM_DIFFERENCE = 1e-6  # of gradients, to the reference's
MINIMUM_SPEEDUP = 5.0  # over chunk by chunk, at the most chunks
PLAIN, CHECKPOINT = "plain torch", "torch.utils.checkpoint"
REFERENCE = UPSTREAM
KEPT = f"{REFERENCE}, nothing checkpointed"
APART = "OffloadModel, chunk by chunk"
FUSED = "ours over OffloadModel"
PEERS = {REFERENCE: "gradcache", KEPT: "gradcache", SENTENCE_TRANSFORMERS: "sentence-transformers"}
TIMED = (REFERENCE, KEPT, "ours", FUSED)
GROWING = (PLAIN, CHECKPOINT, *PEERS, "ours", FUSED)
CHUNKED = (REFERENCE, "ours", APART, FUSED)
KEEPS = {"checkpointed": False}
#: Of each: how it is trained, with which arguments, and how a batch goes through the model.
WAYS: dict[str, tuple[str, dict[str, Any], str]] = {
    PLAIN: (RESIDENT, KEEPS, WHOLE),
    CHECKPOINT: (RESIDENT, {}, WHOLE),
    REFERENCE: (RESIDENT, {}, UPSTREAM),
    KEPT: (RESIDENT, KEEPS, UPSTREAM),
    SENTENCE_TRANSFORMERS: (RESIDENT, {}, SENTENCE_TRANSFORMERS),
    "ours": (RESIDENT, {}, GRADCACHE),
    APART: (DISK, {}, CHUNK_BY_CHUNK),
    FUSED: (DISK, {}, GRADCACHE),
}
TILE_ROWS = 256  # whose scores ours has at a time
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

    @property
    def tokens(self) -> int:
        """Tokens of a step of the part time."""
        return 2 * self.pairs * self.positions


@dataclass(frozen=True)
class Batch(Texts):
    """An encoder, pairs of texts, and chunks. A pair is two rows, one for each tower; the towers are one encoder."""

    kept: int = 0  #: MiB that ours may keep between its passes, layers in memory
    together: int = 0  #: MiB of activations of chunks that run together over an OffloadModel


def batch_of(vocabulary: int, positions: int, dim: int, depth: int, pairs: int, chunk: int, **memory: int) -> Batch:
    """Rows of ``positions`` tokens, chunks of so many rows; ``memory``: of a :class:`Batch`, and MiB of ``graphs``."""
    how: dict[str, Any] = {"dropout": 0.1, "update": False, "chunk": chunk, "tile_rows": TILE_ROWS, **memory}
    return Batch(depth, dim, pairs, positions, vocabulary=vocabulary, **how)


def measure(run: Run) -> None:
    """Runs the groups of cases: times, peaks, growing batches, numbers of chunks."""
    settings = run.settings

    def cases(methods: Sequence[str], function: str, batch: Batch, *environment: Any, **how: Any) -> list[Case]:
        target, how = f"benchmarks.gradcache_batch:{function}", {"batch": asdict(batch), **how}
        return [
            Case(method, target, {"method": method, **how}, *(environment or ({},)), PEERS.get(method, ""))
            for method in methods
        ]

    names = ("vocabulary", "positions", "dim", "depth", "pairs", "chunk", "kept", "graphs")
    timed = batch_of(**{name: getattr(settings, name) for name in names}, together=1024)
    small = batch_of(4096, 16, settings.small_dim, 4, pairs=16, chunk=16, kept=settings.limit // 4, together=8)
    pairs = max(settings.chunks) // 2 or 1
    cut = batch_of(4096, 8, settings.chunked_dim, 4, pairs=pairs, chunk=1, kept=64, graphs=64, together=64)
    grown = {"limit_mebibytes": settings.limit, "most_pairs": settings.most}
    run.group("time", cases(TIMED, "in_turn", timed), "pairs", turns=settings.rounds, warmup=1)
    run.group("peaks", cases(TIMED, "in_turn", timed, GIVE_BACK), turns=2)
    run.group("growing", cases(GROWING, "growing", small, GIVE_BACK, **grown))
    run.group("chunks", cases(CHUNKED, "ladder", cut, chunks=list(settings.chunks), steps=2))


def report(run: Run) -> list[str]:
    """A table for each part."""
    groups, settings, counts = run.groups, run.settings, run.settings.chunks
    reference = groups["time"][0]
    held = {outcome.name: mebibytes(outcome.above()) for outcome in groups["peaks"] if outcome.result is not None}
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
        f"## Time\n\n{parameters / 1e6:.0f} M parameters, {settings.tokens:,} tokens in {2 * settings.pairs} "
        f"rows of {settings.positions}, chunks of {settings.chunk} rows ({settings.chunk * settings.positions} "
        f"tokens). {REFERENCE!r} is the package over `torch.utils.checkpoint`.",
        case_table(groups["time"], times, "method"),
        f"## Largest exact batch in fixed memory\n\nEach process may take {settings.limit} MiB beyond "
        "interpreter, torch and a step of two pairs.",
        case_table(groups["growing"], sizes, "method"),
        "## Chunks\n\nThe same batch in each column.",
        case_table(groups["chunks"], chunks, "method"),
    ]


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
    fused, apart = run.find(FUSED, "chunks"), run.find(APART, "chunks")
    most = max(fused.values("chunks"))
    longer = seconds_of(apart, most) / seconds_of(fused, most)
    broken += at_least(f"{most} chunks: the speed-up over chunk by chunk", longer, MINIMUM_SPEEDUP)
    if len(set(fused.result["bytes_loaded"].values())) != 1:
        broken.append(f"bytes loaded must not depend on the chunks, are {fused.result['bytes_loaded']}")
    return broken


def claims(run: Run) -> list[Claim]:
    """Ours on disk, beside the package over ``torch.utils.checkpoint`` in memory."""
    reference = run.find(REFERENCE, "peaks")
    tokens, parameters = run.settings.tokens, reference.result["parameters"] / 1e6
    batch = f"gradients of a contrastive batch of {tokens:,} tokens, {parameters:.0f} M parameters"
    beside = "all in memory, GradCache over `torch.utils.checkpoint`"
    memory = run.find(FUSED, "peaks").above() / reference.above()
    ratios = run.find(FUSED, "time").ratios()
    return [Claim(f"{batch}; parameters and gradients on disk", beside, ratios, memory, " above torch")]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)

# --- cases -----------------------------------------------------------------------------------------------------------

SKETCH_PIECE = 4096


def make(method: str, batch: Batch) -> Method:
    """The model and the step of a method; a case works in a folder on disk."""
    from offload import MemoryPolicy

    name, how, way = WAYS[method]
    function, options = METHODS[name]
    settings: dict[str, Any] = {"num_slices": batch.blocks + 2} if name == DISK else {}
    if method == FUSED:
        graphs, boundaries, activations = (each << 20 for each in (batch.graphs, batch.kept, batch.together))
        memory = {"graph_bytes": graphs, "boundary_bytes": boundaries, "activation_bytes": activations}
        settings |= {"policy": MemoryPolicy.fixed(**memory, join_chunks=True)}
    return function(replace(batch, way=way), Path(), None, **options, **how, **settings)


def in_turn(report: Reporter, method: str, batch: dict[str, Any]) -> dict[str, Any]:
    """One step in each turn, in the phase "steps". The result holds a sketch of the last gradient: :func:`sketch`."""
    importlib.import_module("torch._dynamo")  # torch imports it in the middle of a first checkpoint
    report.phase(FLOOR)
    chosen = Batch(**batch)
    made, rows = make(method, chosen), chosen.example(0)
    report.phase(STEPS)
    take_turns(report, made, lambda k: rows)
    report.phase("end")
    return {"parameters": sum(p.numel() for _, p in made.parameters()), "sketch": sketch(made.parameters())}


def growing(
    report: Reporter, method: str, batch: dict[str, Any], limit_mebibytes: int, most_pairs: int
) -> dict[str, Any]:
    """Steps with batches that double until memory does not hold them, or ``most_pairs`` is reached.

    Private memory of the process may grow by ``limit_mebibytes`` over what interpreter, torch and one small step of the
    same method took; the kernel refuses more, as a smaller machine would. Files are not limited.
    """
    chosen = Batch(**batch)
    small = replace(chosen, rows=2, chunk=1)
    _take(make(method, small), small)
    report.phase(FLOOR)
    _, held = memory_of(os.getpid())
    if not held:
        raise OSError("expected a system that tells a process's private memory, as Linux does")
    cap_memory(held + (limit_mebibytes << 20))
    pairs, fitted, ended = chosen.chunk, 0, ""
    sketches: dict[str, list[float]] = {}
    try:
        made = make(method, chosen)
        while pairs <= most_pairs:
            values = _take(made, replace(chosen, rows=pairs))
            if pairs <= 4 * chosen.chunk:
                sketches[str(pairs)] = sketch(made.parameters())
            fitted = pairs
            report.step(pairs=pairs, **values)
            pairs *= 2
    except LOST as error:
        ended = told_by(error)
    return {"pairs": fitted, "ended": ended, "sketches": sketches}


def ladder(report: Reporter, method: str, batch: dict[str, Any], chunks: list[int], steps: int) -> dict[str, Any]:
    """Steps with the batch in more and more chunks, a fresh model for each number of them."""
    chosen = Batch(**batch)
    loads: dict[str, float | None] = {}
    for count in chunks:
        finer = replace(chosen, chunk=max(2 * chosen.rows // count, 1))
        made = make(method, finer)
        _take(made, finer)
        for _ in range(steps):
            values = _take(made, finer)
            report.step(chunks=count, **values)
            loads[str(count)] = values.get("bytes_loaded")
        del made
    return {"bytes_loaded": loads}


def _take(made: Method, batch: Batch) -> dict[str, float]:
    rows = batch.example(0)
    loss, values = take(lambda: float(made.step(*rows)), made.model)
    return {"loss": loss, **values}


def sketch(parameters: Iterable[tuple[str, Tensor]]) -> list[float]:
    """Random projections of the gradient: the relative difference of two sketches estimates that of the gradients.

    Each parameter's gradient is cut into up to 64 pieces, and the beginning of each piece is projected on one vector of
    random signs, the same in every process.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (SKETCH_PIECE,), generator=generator).double() * 2 - 1
    found: list[float] = []
    for _, parameter in sorted(parameters, key=lambda item: item[0]):
        flat = parameter.grad.detach().flatten()
        pieces = flat.chunk(min(64, max(1, flat.numel() // SKETCH_PIECE)))
        found += [float(piece[:SKETCH_PIECE].double() @ signs[: len(piece[:SKETCH_PIECE])]) for piece in pieces]
    return found
