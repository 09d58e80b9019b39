"""``offload-step``: a forward and backward that streams its model from disk, beside the resident model.

One case takes steps of the resident and of the streamed model in turn, for the ratio of their times and the share of
the streamed step that waits for copies. Others stream models of more and more shards, for their peaks: once the same
layers cut finer, once deeper models out of the same shards. With a slot for each shard and a home in memory nothing
moves, which leaves the price of the engine. With few rows only the disk counts, and passes are measured against plain
reads of the same files. A model that calls its blocks itself (``blocks=``) takes turns with an ``nn.Sequential`` of the
same blocks: of the model that is timed, and of one so small that the price of a call shows.

glibc keeps freed blocks in its heap, and keeps more of them the more shards there are. The peaks are therefore measured
with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns large blocks at once and takes time; one more case shows the
deepest model under the default allocator. Times are always measured under the default allocator.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_least, at_most, case_table, limit_columns, mebibytes, spread
from benchmarks.offload_step.methods import stack_of

MAXIMUM_RATIO = 1.05
MAXIMUM_ENGINE_RATIO = 1.02
MAXIMUM_BLOCKS_RATIO = 1.02
MINIMUM_DISK_SHARE = 0.90
MAXIMUM_WAIT_SHARE = 0.05
MAXIMUM_GROWTH = 1.05  # of what the engine holds and of the peak above torch, from the fewest to the most shards
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
METHODS = "benchmarks.offload_step.methods"
TIMED_SHARDS = 8
HOME = "./home"  # in the folder of the run


@dataclass(frozen=True)
class Settings:
    """Sizes, and the number of pairs."""

    dim: int = option(512, "channels", multiple=64)
    rows: int = option(32, "rows of the batch", least=4)
    positions: int = option(64, "tokens of a row")
    shards: tuple[int, ...] = option((4, 8, 16), "each a multiple of the one before")
    pairs: int = option(9, "interleaved pairs of steps")
    boundary_bytes: int = option(16 << 20, "activations between shards that stay in memory")
    width: int = option(4096, "channels of the layers that wait for the disk")
    only_blocks: bool = option(False, "measures a model's own forward beside an nn.Sequential, and nothing else")
    small_dim: int = option(128, "channels of the smaller blocks that these two share", multiple=64)
    small_rows: int = option(8, "rows of their batch", least=4)
    small_pairs: int = option(99, "interleaved pairs of their steps")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: numbers of shards have to divide the next one."""
        if any(larger % smaller or larger == smaller for smaller, larger in itertools.pairwise(self.shards)):
            return f"expected numbers of shards, each a multiple of the one before, got shards={self.shards}"
        return ""


def measure(run: Run) -> None:
    """Time, peaks of finer and of deeper models, the engine alone, the disk alone."""
    settings, layers = run.settings, max(run.settings.shards)

    def case(
        name: str, function: str, shards: int, blocks: int, *environment: Any, home: str = HOME, **how: Any
    ) -> Case:
        sizes = {name: getattr(settings, name) for name in ("dim", "rows", "positions", "boundary_bytes")}
        shape = {"shards": shards, "blocks": blocks, **sizes}
        stack = stack_of(shape)
        # Each parameter is read from its file, its gradient is written.
        on_disk = 4.0 * stack.parameters if home == HOME else 0.0
        work = {"flops": stack.training_flops, "read_bytes": on_disk, "written_bytes": on_disk}
        return Case(name, f"{METHODS}:{function}", {"shape": shape, "home": home, **how}, *environment, work=work)

    def peak(name: str, shards: int, blocks: int, *environment: Any) -> Case:
        # A peak is a maximum over visits of shards: deeper models get no more visits than others.
        steps = 2 if blocks > 1 else 2 * layers // shards
        return case(name, "peak", shards, blocks, *environment, steps=steps)

    def own_forward(name: str, dim: int, rows: int, pairs: int, chunks: int) -> Case:
        shape = {"dim": dim, "rows": rows, "shards": TIMED_SHARDS, "blocks": 1}
        shape |= {"positions": settings.positions, "boundary_bytes": settings.boundary_bytes}
        arguments = {"shape": shape, "pairs": pairs, "warmup": 4, "chunks": chunks}
        work = {"flops": stack_of(shape).training_flops}
        return Case(name, f"{METHODS}:time_blocks", arguments, work=work)

    for group, *size in (
        ("blocks", settings.dim, settings.rows, settings.pairs),
        ("small blocks", settings.small_dim, settings.small_rows, settings.small_pairs),
    ):
        names = {chunks: f"{group}, {chunks} chunk{'s' * (chunks > 1)}" for chunks in (1, 4)}
        run.group(group, [own_forward(name, *size, chunks) for chunks, name in names.items()])
    if settings.only_blocks:
        return
    timed = {"pairs": settings.pairs, "warmup": 2}
    cuts = [
        peak(f"{layers} layers, {shards} shards", shards, layers // shards, GIVE_BACK) for shards in settings.shards
    ]
    deeper = [peak(f"1 layer each, {shards} shards", shards, 1, GIVE_BACK) for shards in settings.shards]
    run.group("time", [case(f"time, {TIMED_SHARDS} shards", "time_pairs", TIMED_SHARDS, 1, **timed)])
    run.group("finer", cuts)
    run.group("deeper", deeper)
    run.group("allocator", [peak(f"{deeper[-1].name}, allocator as it comes", layers, 1)])
    run.group("engine", [case("all in slots", "time_pairs", TIMED_SHARDS, 1, home="cpu", slots=TIMED_SHARDS, **timed)])
    disk = {"width": settings.width, "layers": 32, "shards": 16, "rows": 1, "pairs": settings.pairs}
    cases = []
    for train, what in ((False, "inputs"), (True, "weights")):
        how = {"home": f"./{what}", "train": train, **disk}
        cases.append(Case(f"disk, {what} take gradients", f"{METHODS}:stream", how))
    run.group("disk", cases)


def report(run: Run) -> list[str]:
    """Times, disk, peaks."""
    groups = run.groups

    def moved(outcome: Outcome) -> dict[str, float]:
        return {
            kind: statistics.median(1e9 * step[key] * step["seconds"] for step in outcome.steps)
            for kind, key in (("read_bytes", "streamed"), ("written_bytes", "stored"))
        }

    times = {
        "parameters": lambda o: f"{o.result['parameters'] / 1e6:.0f} M",
        "tokens": lambda o: f"{o.result['tokens']:,}",
        "resident": lambda o: f"{o.median('resident'):.2f} s",
        "streamed": lambda o: f"{o.median('streamed'):.2f} s",
        "median ratio of pairs": lambda o: spread(o.ratios()),
        "waiting": lambda o: f"{_wait_share(o):.1%}",
        "predicted": lambda o: f"{o.result['predicted']:.2f} s",
        **limit_columns(run.rates, seconds=lambda o: o.median("streamed")),
    }
    disk = {
        "files": lambda o: mebibytes(o.result["bytes"]),
        "plain, direct": lambda o: f"{o.median('plain_direct'):.2f}",
        "plain, cached": lambda o: f"{o.median('plain_cached'):.2f}",
        "loaded": lambda o: f"{o.median('streamed'):.2f}",
        "stored": lambda o: f"{o.median('stored'):.2f}",
        "loaded / faster plain": lambda o: (
            f"{o.median('share'):.1%} ({min(o.values('share')):.0%} to {max(o.values('share')):.0%})"
        ),
        "s/step": lambda o: f"{o.median():.2f}",
        "predicted": lambda o: "-" if o.result["predicted"] is None else f"{o.result['predicted']:.2f}",
        **limit_columns(run.rates, moved),
    }
    held = {
        "parameters and gradients": lambda o: mebibytes(8 * o.result["parameters"]),
        "held by the engine": lambda o: mebibytes(_held(o)),
        "peak above torch": lambda o: mebibytes(o.above()),
        "whole peak": lambda o: mebibytes(o.peaks["steps"]),
        "s/step": lambda o: f"{o.median():.2f}",
        **limit_columns(run.rates),
    }
    blocks = {
        "channels": lambda o: str(o.case.arguments["shape"]["dim"]),
        "tokens": lambda o: f"{o.result['tokens']:,}",
        "nn.Sequential": lambda o: f"{1e3 * o.median('sequential'):.1f} ms",
        "own forward": lambda o: f"{1e3 * o.median('blocks'):.1f} ms",
        "median ratio of pairs": lambda o: spread(o.ratios()),
        "of processor time": lambda o: spread(o.values("processor")),
        **limit_columns(run.rates, seconds=lambda o: o.median("blocks")),
    }
    words = "A model that calls its blocks itself, beside an `nn.Sequential` of them, both stored in host memory:"
    both = [*groups.get("blocks", []), *groups.get("small blocks", [])]
    own = [words, case_table(both, blocks)] if both else []
    if run.settings.only_blocks:
        return own
    return [
        case_table([*groups["time"], *groups["engine"]], times),
        "Passes in which only the disk counts, in GB/s, beside plain reads of the same files:",
        case_table(groups["disk"], disk),
        case_table([*groups["finer"], *groups["deeper"], *groups["allocator"]], held),
        *own,
    ]


def _wait_share(outcome: Outcome) -> float:
    return float(sum(outcome.values("waited")) / sum(outcome.values("streamed")))


def _held(outcome: Outcome) -> int:
    """Peak bytes that the engine itself holds on the compute device."""
    return int(outcome.result["statistics"]["peak_device_bytes"])


def bounds(run: Run) -> list[str]:
    """Writes compete with reads, so only a pass without them is held to the bandwidth of reads."""
    groups = run.groups
    broken: list[str] = []
    for outcome in (*groups.get("blocks", []), *groups.get("small blocks", [])):
        broken += at_most(f"{outcome.name} / Sequential", outcome.ratio(), MAXIMUM_BLOCKS_RATIO, "{:.3f}".format)
    if run.settings.only_blocks:
        return broken
    (timed,), (engine,) = groups["time"], groups["engine"]
    broken += at_most("streamed / resident", timed.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    broken += at_most("the share of a step that waits", _wait_share(timed), MAXIMUM_WAIT_SHARE, "{:.1%}".format)
    for outcomes in (groups["finer"], groups["deeper"]):
        first, last = outcomes[0], outcomes[-1]
        names = f"from {first.name} to {last.name}"
        broken += at_most(f"held by the engine, {names}:", _held(last), MAXIMUM_GROWTH * _held(first), mebibytes)
        most = MAXIMUM_GROWTH * first.above()
        broken += at_most(f"peak above torch, {names}:", last.above(), most, mebibytes)
    broken += at_most("all in slots / resident", engine.ratio(), MAXIMUM_ENGINE_RATIO, "{:.3f}".format)
    broken += at_most("shard loads with a slot for each shard", sum(engine.values("loads")), 0)
    share = groups["disk"][0].median("share")
    return broken + at_least("loaded / plain read", share, MINIMUM_DISK_SHARE, "{:.1%}".format)


def claims(run: Run) -> list[Claim]:
    """The streamed step beside the resident one."""
    if run.settings.only_blocks:
        return []
    (timed,) = run.groups["time"]
    parameters, tokens = timed.result["parameters"] / 1e6, timed.result["tokens"]
    set_up = (
        f"forward and backward of {parameters:.0f} M parameters, {tokens:,} tokens; parameters and gradients on disk"
    )
    return [Claim(set_up, "all in memory, `torch.utils.checkpoint`", timed.ratios())]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
