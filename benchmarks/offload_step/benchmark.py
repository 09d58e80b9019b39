"""``offload-step``: a forward and backward that streams its model from disk, beside the resident model.

One case takes steps of the resident and of the streamed model in turn, for the ratio of their times and the share of
the streamed step that waits for copies. Others stream models of more and more shards, for their peaks: once the same
layers cut finer, once deeper models out of the same shards. With a slot for each shard and a home in memory nothing
moves, which leaves the price of the engine. With few rows only the disk counts, and passes are measured against plain
reads of the same files.

glibc keeps freed blocks in its heap, and keeps more of them the more shards there are. The peaks are therefore measured
with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns large blocks at once and takes time; one more case shows the
deepest model under the default allocator. Times are always measured under the default allocator.
"""

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan, Report, Run
from benchmarks.harness.case import Case, Outcome, failures
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_least, at_most, case_table, limit_columns, mebibytes, reasons, spread
from benchmarks.offload_step.methods import stack_of

MAXIMUM_RATIO = 1.05
MAXIMUM_ENGINE_RATIO = 1.02
MINIMUM_DISK_SHARE = 0.90
MAXIMUM_WAIT_SHARE = 0.05
MAXIMUM_GROWTH = 1.05  # of what the engine holds and of the peak above torch, from the fewest to the most shards
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
METHODS = "benchmarks.offload_step.methods"
TIMED_SHARDS = 8


@dataclass(frozen=True)
class Settings:
    """Sizes, and the number of pairs."""

    dim: int = option(512, "channels", multiple=64)
    rows: int = option(32, "rows of the batch")
    positions: int = option(64, "tokens of a row")
    shards: tuple[int, ...] = option((4, 8, 16), "each a multiple of the one before")
    pairs: int = option(9, "interleaved pairs of steps")
    boundary_bytes: int = option(16 << 20, "activations between shards that stay in memory")
    width: int = option(4096, "channels of the layers that wait for the disk")

    def wrong(self) -> list[str]:
        """What no run could compare."""
        if any(larger % smaller or larger == smaller for smaller, larger in itertools.pairwise(self.shards)):
            return [f"expected numbers of shards, each a multiple of the one before, got shards={self.shards}"]
        return []


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: time, peaks of finer and of deeper models, the engine alone, the disk alone."""

    def shape(shards: int, blocks: int) -> dict[str, Any]:
        sizes = {name: getattr(settings, name) for name in ("dim", "rows", "positions", "boundary_bytes")}
        return {"shape": {"shards": shards, "blocks": blocks, **sizes}, "home": folder}

    def peak(name: str, shards: int, blocks: int) -> Case:
        # A peak is a maximum over visits of shards: deeper models get no more visits than others.
        steps = 2 if blocks > 1 else 2 * layers // shards
        return Case(f"{name}, {shards} shards", f"{METHODS}:peak", {**shape(shards, blocks), "steps": steps}, GIVE_BACK)

    layers = max(settings.shards)
    timed = {**shape(TIMED_SHARDS, 1), "pairs": settings.pairs, "warmup": 2}
    deeper = [peak("1 layer each", shards, 1) for shards in settings.shards]
    yield Group("time", [Case(f"time, {TIMED_SHARDS} shards", f"{METHODS}:time_pairs", timed)])
    yield Group("finer", [peak(f"{layers} layers", shards, layers // shards) for shards in settings.shards])
    yield Group("deeper", deeper)
    deepest = deeper[-1]
    yield Group("allocator", [Case(f"{deepest.name}, allocator as it comes", deepest.target, deepest.arguments)])
    in_slots = {**timed, "home": "cpu", "slots": TIMED_SHARDS}
    yield Group("engine", [Case("all in slots", f"{METHODS}:time_pairs", in_slots)])
    disk = {"width": settings.width, "layers": 32, "shards": 16, "rows": 1, "pairs": settings.pairs}
    cases = []
    for train, what in ((False, "inputs"), (True, "weights")):
        how = {"home": f"{folder}/{train}", "train": train, **disk}
        cases.append(Case(f"disk, {what} take gradients", f"{METHODS}:stream", how))
    yield Group("disk", cases)


def report(run: Run[Any]) -> Report:
    """Times, disk, peaks."""
    groups = run.groups
    peaks = [*groups["finer"], *groups["deeper"], *groups["allocator"]]

    def least_seconds(outcome: Outcome) -> float:
        """A forward and a backward with nothing recomputed; each parameter read from its file, its gradient written."""
        on_disk = 0 if outcome.case.arguments["home"] == "cpu" else _model_bytes(outcome) / 2
        flops = stack_of(outcome.case.arguments["shape"]).training_flops
        return run.limits.step_seconds(flops=flops, read_bytes=on_disk, written_bytes=on_disk)

    def disk_seconds(outcome: Outcome) -> float:
        read, written = (
            statistics.median(1e9 * step[key] * step["seconds"] for step in outcome.steps)
            for key in ("streamed", "stored")
        )
        return run.limits.step_seconds(read_bytes=read, written_bytes=written)

    times = {
        "parameters": lambda o: f"{o.done['parameters'] / 1e6:.0f} M",
        "tokens": lambda o: f"{o.done['tokens']:,}",
        "resident": lambda o: f"{o.median('resident'):.2f} s",
        "streamed": lambda o: f"{o.median('streamed'):.2f} s",
        "median ratio of pairs": lambda o: spread(o.ratios()),
        "waiting": lambda o: f"{_wait_share(o):.1%}",
        "predicted": lambda o: f"{o.done['predicted']:.2f} s",
        **limit_columns(run.limits, least_seconds, lambda o: o.median("streamed")),
    }
    disk = {
        "files": lambda o: mebibytes(o.done["bytes"]),
        "plain, direct": lambda o: f"{o.median('plain_direct'):.2f}",
        "plain, cached": lambda o: f"{o.median('plain_cached'):.2f}",
        "loaded": lambda o: f"{o.median('streamed'):.2f}",
        "stored": lambda o: f"{o.median('stored'):.2f}",
        "loaded / faster plain": lambda o: f"{o.median('share'):.1%} ({min(_shares(o)):.0%} to {max(_shares(o)):.0%})",
        "s/step": lambda o: f"{o.median():.2f}",
        "predicted": lambda o: "-" if o.done["predicted"] is None else f"{o.done['predicted']:.2f}",
        **limit_columns(run.limits, disk_seconds),
    }
    held = {
        "parameters and gradients": lambda o: mebibytes(_model_bytes(o)),
        "held by the engine": lambda o: mebibytes(_held(o)),
        "peak above torch": lambda o: mebibytes(o.above()),
        "whole peak": lambda o: mebibytes(o.peaks["steps"]),
        "s/step": lambda o: f"{o.median():.2f}",
        **limit_columns(run.limits, least_seconds),
    }
    sections = [
        case_table([*groups["time"], *groups["engine"]], times),
        "Passes in which only the disk counts, in GB/s, beside plain reads of the same files:",
        case_table(groups["disk"], disk),
        case_table(peaks, held),
        reasons(run.outcomes),
    ]
    return Report(sections, broken_bounds(groups))


def _shares(outcome: Outcome) -> list[float]:
    return [step["share"] for step in outcome.steps]


def _wait_share(outcome: Outcome) -> float:
    return float(sum(step["waited"] for step in outcome.steps) / sum(step["streamed"] for step in outcome.steps))


def _held(outcome: Outcome) -> int:
    """Peak bytes that the engine itself holds on the compute device."""
    return int(outcome.done["statistics"]["peak_device_bytes"])


def _model_bytes(outcome: Outcome) -> int:
    """Of parameters and gradients."""
    return 8 * int(outcome.done["parameters"])


def broken_bounds(groups: dict[str, list[Outcome]]) -> list[str]:
    """Bounds that do not hold, one line each. Writes compete with reads, so only a pass without them is held to the
    bandwidth of reads."""
    broken = failures(outcome for outcomes in groups.values() for outcome in outcomes)
    if broken:
        return broken
    (timed,), (engine,) = groups["time"], groups["engine"]
    broken += at_most("streamed / resident", timed.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    broken += at_most("the share of a step that waits", _wait_share(timed), MAXIMUM_WAIT_SHARE, "{:.1%}".format)
    for outcomes in (groups["finer"], groups["deeper"]):
        first, last = outcomes[0], outcomes[-1]
        names = f"from {first.name} to {last.name}"
        broken += at_most(f"held by the engine, {names}:", _held(last), MAXIMUM_GROWTH * _held(first), mebibytes)
        above = [outcome.above() for outcome in (first, last)]
        broken += at_most(f"peak above torch, {names}:", above[1], MAXIMUM_GROWTH * above[0], mebibytes)
    broken += at_most("all in slots / resident", engine.ratio(), MAXIMUM_ENGINE_RATIO, "{:.3f}".format)
    broken += at_most("shard loads with a slot for each shard", sum(step["loads"] for step in engine.steps), 0)
    share = groups["disk"][0].median("share")
    return broken + at_least("loaded / plain read", share, MINIMUM_DISK_SHARE, "{:.1%}".format)


BENCHMARK = Benchmark(Settings, plan, report)
