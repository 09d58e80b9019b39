"""Tables, bounds and picture of ``offload-step``."""

import statistics
from typing import Any

from benchmarks.harness.benchmark import Report, Run
from benchmarks.harness.case import Outcome, failures
from benchmarks.harness.table import at_least, at_most, case_table, limit_columns, mebibytes, reasons, spread
from benchmarks.offload_step.methods import FLOOR, stack_of

MAXIMUM_RATIO = 1.05
MAXIMUM_ENGINE_RATIO = 1.02
MINIMUM_DISK_SHARE = 0.90
MAXIMUM_WAIT_SHARE = 0.05
MAXIMUM_GROWTH = 1.05  # of what the engine holds and of the peak above torch, from the fewest to the most shards


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
        "peak above torch": lambda o: mebibytes(o.above(FLOOR)),
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
        above = [outcome.above(FLOOR) for outcome in (first, last)]
        broken += at_most(f"peak above torch, {names}:", above[1], MAXIMUM_GROWTH * above[0], mebibytes)
    broken += at_most("all in slots / resident", engine.ratio(), MAXIMUM_ENGINE_RATIO, "{:.3f}".format)
    broken += at_most("shard loads with a slot for each shard", sum(step["loads"] for step in engine.steps), 0)
    share = groups["disk"][0].median("share")
    return broken + at_least("loaded / plain read", share, MINIMUM_DISK_SHARE, "{:.1%}".format)
