"""``pipe-ladder``: time and memory of our pipe beside torchgpipe's and fairscale's.

Two CPU stages and 1 to 16 micro-batches. One case for each number takes steps of the pipes in turn and gives the
ratios of their times, for cells of milliseconds and for tiny cells. For each pipe, and for other schedules of ours,
another case gives the peak memory.
"""

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.peers import find_peer
from benchmarks.harness.table import at_most, case_table, mebibytes
from benchmarks.pipe_ladder.methods import METHODS, Settings

MAXIMUM_RATIO = 1.0  # of processor time, ours to each ancestor's: geometric mean over the numbers of micro-batches
MAXIMUM_PEAK_RATIO = 1.02  # of the peak above the model; the allocator makes as much difference
PIPES = ["ours", "torchgpipe", "fairscale"]
TINY = {"dim": 16, "rows": 64}  # layers take next to no time: nearly all of a step is what a pipe adds
KINDS = ("processor", "clock")
TIME = (
    "Time: steps of the pipes in turn, in one process; medians. `processor` is processor time, which other work on the "
    "machine does not change; `clock` is time by the clock. The bound is on processor time of the first table. glibc "
    "keeps freed memory here, so that no pipe pays for pages that another one returned."
)
TINY_TIME = f"The same with {TINY['dim']} channels and {TINY['rows']} rows: what a pipe itself costs. No bound."
PEAK = (
    "Memory and time of each method at the largest number of micro-batches, each in its own process and with freed "
    "memory returned at once, which takes time. Below the first three: ours with another schedule."
)
MODULE = "benchmarks.pipe_ladder.methods"
#: Of tiny cells: as many times the rounds, and steps in a row until a turn has so many micro-batches. A step of a
#: millisecond differs by a third from the next one, and takes next to no time.
MORE_ROUNDS = 15
TURN_MICROBATCHES = 16
#: Where pipes take turns in one process, glibc may return one's pages just before the next one needs them. Kept, they
#: cost no pipe anything.
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
#: Where memory is measured, freed memory is returned at once: how much glibc keeps is chance.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def measure(run: Run) -> None:
    """Time, tiny cells, peaks."""
    names = PIPES[:1]  # steps in turn are of one process: the ancestors that are installed here
    for name in PIPES[1:]:
        with contextlib.suppress(CannotRunError):
            names += [name] if find_peer(name) else []

    def case(title: str, function: str, environment: dict[str, str], sizes: Settings, **how: Any) -> Case:
        peer = title if title in PIPES[1:] else ""
        return Case(title, f"{MODULE}:{function}", {"settings": asdict(sizes), **how}, environment, peer)

    def timed(title: str, sizes: Settings, microbatches: int) -> list[Case]:
        return [
            case(
                f"{title}, {n} micro-batches", "time_rounds", KEEP_PAGES, sizes, chunks=n, names=names, repeats=repeats
            )
            for n, repeats in ((n, -(-microbatches // n)) for n in sizes.chunks if n <= sizes.rows)
        ]

    tiny = replace(run.settings, **TINY, rounds=MORE_ROUNDS * run.settings.rounds)
    run.group("time", timed("time", run.settings, 1))
    run.group("tiny cells", timed("tiny cells", tiny, TURN_MICROBATCHES))
    run.group("peaks", [case(name, "peak", GIVE_BACK, run.settings, name=name, steps=5) for name in METHODS])


def report(run: Run) -> list[str]:
    """Times, peaks."""
    groups, peaks = run.groups, run.groups["peaks"]

    def times(outcomes: Sequence[Outcome]) -> str:
        names = _names(outcomes)
        columns: dict[str, Callable[[Outcome], str]] = {}
        for name in names:
            columns[f"{name}, ms"] = lambda o, key=f"{name}: processor": f"{1e3 * o.median(key):.1f}"
        for name in names[1:]:
            for kind in KINDS:
                columns[f"ours / {name}, {kind}"] = lambda o, pair=(name, kind): f"{ratio_of(o, *pair):.3f}"
        means = [
            f"{name}, {kind}: {mean_ratio(outcomes, name, kind):.3f}"
            for name in names[1:]
            for kind in KINDS
            if not any(outcome.reason for outcome in outcomes)
        ]
        table = case_table(outcomes, columns)
        return f"{table}\n\nGeometric means of ours to {'; '.join(means)}." if means else table

    held = {
        "micro-batches": lambda o: str(o.result["chunks"]),
        "peak above the model": lambda o: mebibytes(_above(o)),
        "to ours": lambda o: f"{_above(o) / _above(peaks[0]):.2f}x" if peaks[0].result else "-",
        "ms/step": lambda o: f"{1e3 * o.median():.0f}",
    }
    sections = [TIME, times(groups["time"]), TINY_TIME, times(groups["tiny cells"])]
    return [*sections, PEAK, case_table(peaks, held, "method")]


def _above(outcome: Outcome) -> int:
    """Peak bytes above the model; a tiny model may need no page more."""
    return max(1, int(outcome.result["above_model"]))


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    """The pipes that were timed: those that the first finished case reports."""
    done = next((outcome for outcome in outcomes if outcome.steps), None)
    return [name for name in PIPES if done is not None and f"{name}: clock" in done.steps[0]]


def ratio_of(outcome: Outcome, other: str, kind: str = "processor") -> float:
    """Median over the rounds of our time to another pipe's."""
    return float(statistics.median(step[f"ours: {kind}"] / step[f"{other}: {kind}"] for step in outcome.steps))


def mean_ratio(timed: Sequence[Outcome], other: str, kind: str = "processor") -> float:
    """Geometric mean over the numbers of micro-batches of :func:`ratio_of`."""
    return statistics.geometric_mean(ratio_of(outcome, other, kind) for outcome in timed)


def bounds(run: Run) -> list[str]:
    """Ours takes no more processor time than an ancestor, and as good as no more memory."""
    broken: list[str] = []
    timed, (ours, *others) = run.groups["time"], run.groups["peaks"]
    for name in _names(timed)[1:]:
        what = f"processor time, ours / {name}:"
        broken += at_most(what, mean_ratio(timed, name), MAXIMUM_RATIO, "{:.3f}".format)
    for outcome in others:
        if outcome.case.peer and outcome.result is not None:
            ratio = _above(ours) / _above(outcome)
            broken += at_most(f"peak, ours / {outcome.name}:", ratio, MAXIMUM_PEAK_RATIO, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """Beside each ancestor: processor time, a ratio for each number of micro-batches, and memory."""
    timed, ours = run.groups["time"], run.groups["peaks"][0]
    counts = run.settings.chunks
    set_up = f"processor time of two CPU stages, {counts[0]} to {counts[-1]} micro-batches"
    found = []
    for name, words in (("torchgpipe", "torchgpipe 0.0.7"), ("fairscale", "fairscale 0.4.13 Pipe")):
        theirs = run.find(name, "peaks")
        times = [ratio_of(outcome, name) for outcome in timed]
        memory = ours.result["above_model"] / theirs.result["above_model"]
        found.append(Claim(set_up, words, times, memory, " above the model", statistics.geometric_mean))
    return found


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
