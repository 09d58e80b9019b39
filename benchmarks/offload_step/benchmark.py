"""``offload-step``: a forward and backward that streams its model from disk, beside the resident model.

One case takes steps of the resident and of the streamed model in turn, for the ratio of their times and the share of
the streamed step that waits for copies. Others stream deeper and deeper models out of the same shards, for their peaks.
With a slot for each shard and a home in memory nothing moves, which leaves the price of the engine.

glibc keeps freed blocks in its heap, and keeps more of them the more shards there are. The peaks are therefore measured
with a fixed ``MALLOC_MMAP_THRESHOLD_``, which returns large blocks at once and takes time; times are measured under the
default allocator.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread

MAXIMUM_RATIO = 1.05
MAXIMUM_ENGINE_RATIO = 1.02
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
    shards: tuple[int, ...] = option((4, 8, 16), "numbers of shards of the models whose peaks are measured")
    pairs: int = option(9, "interleaved pairs of steps")
    boundary_bytes: int = option(16 << 20, "activations between shards that stay in memory")


def measure(run: Run) -> None:
    """Time, peaks of deeper models, the engine alone."""
    settings = run.settings

    def case(name: str, function: str, shards: int, *environment: Any, home: str = HOME, **how: Any) -> Case:
        shape = {name: getattr(settings, name) for name in ("dim", "rows", "positions", "boundary_bytes")}
        arguments = {"shape": {"shards": shards, **shape}, "home": home, **how}
        return Case(name, f"{METHODS}:{function}", arguments, *environment)

    def peak(shards: int) -> Case:
        # A peak is a maximum over visits of shards: deeper models get no more visits than others.
        steps = 2 * max(settings.shards) // shards
        return case(f"1 layer each, {shards} shards", "peak", shards, GIVE_BACK, steps=steps)

    timed = {"pairs": settings.pairs, "warmup": 2}
    run.group("time", [case(f"time, {TIMED_SHARDS} shards", "time_pairs", TIMED_SHARDS, **timed)])
    run.group("deeper", [peak(shards) for shards in settings.shards])
    run.group("engine", [case("all in slots", "time_pairs", TIMED_SHARDS, home="cpu", slots=TIMED_SHARDS, **timed)])


def report(run: Run) -> list[str]:
    """Times, peaks."""
    groups = run.groups
    times = {
        "parameters": lambda o: f"{o.result['parameters'] / 1e6:.0f} M",
        "tokens": lambda o: f"{o.result['tokens']:,}",
        "resident": lambda o: f"{o.median('resident'):.2f} s",
        "streamed": lambda o: f"{o.median('streamed'):.2f} s",
        "median ratio of pairs": lambda o: spread(o.ratios()),
        "waiting": lambda o: f"{_wait_share(o):.1%}",
    }
    held = {
        "parameters and gradients": lambda o: mebibytes(8 * o.result["parameters"]),
        "held by the engine": lambda o: mebibytes(_held(o)),
        "peak above torch": lambda o: mebibytes(o.above()),
        "whole peak": lambda o: mebibytes(o.peaks["steps"]),
        "s/step": lambda o: f"{o.median():.2f}",
    }
    return [
        case_table([*groups["time"], *groups["engine"]], times),
        case_table(groups["deeper"], held),
    ]


def _wait_share(outcome: Outcome) -> float:
    return float(sum(outcome.values("waited")) / sum(outcome.values("streamed")))


def _held(outcome: Outcome) -> int:
    """Peak bytes that the engine itself holds on the compute device."""
    return int(outcome.result["statistics"]["peak_device_bytes"])


def bounds(run: Run) -> list[str]:
    """The streamed step is hardly longer, hardly waits, and its peak does not grow with the number of shards."""
    groups = run.groups
    broken: list[str] = []
    (timed,), (engine,) = groups["time"], groups["engine"]
    broken += at_most("streamed / resident", timed.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    broken += at_most("the share of a step that waits", _wait_share(timed), MAXIMUM_WAIT_SHARE, "{:.1%}".format)
    first, last = groups["deeper"][0], groups["deeper"][-1]
    names = f"from {first.name} to {last.name}"
    broken += at_most(f"held by the engine, {names}:", _held(last), MAXIMUM_GROWTH * _held(first), mebibytes)
    broken += at_most(f"peak above torch, {names}:", last.above(), MAXIMUM_GROWTH * first.above(), mebibytes)
    broken += at_most("all in slots / resident", engine.ratio(), MAXIMUM_ENGINE_RATIO, "{:.3f}".format)
    return broken + at_most("shard loads with a slot for each shard", sum(engine.values("loads")), 0)


def claims(run: Run) -> list[Claim]:
    """The streamed step beside the resident one."""
    (timed,) = run.groups["time"]
    parameters, tokens = timed.result["parameters"] / 1e6, timed.result["tokens"]
    set_up = (
        f"forward and backward of {parameters:.0f} M parameters, {tokens:,} tokens; parameters and gradients on disk"
    )
    return [Claim(set_up, "all in memory, `torch.utils.checkpoint`", timed.ratios())]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
