"""``transfers``: whether the kernel's asynchronous I/O moves files faster than threads, and huge pages memory.

Cases of a group take turns, so that they share each moment of the disk. From :data:`WORTH` on a library is worth a
trial in whole steps, where its gain may be lost. caio, which is kept best, is not among
them: it reads into memory of its own that does not begin on a page, so the kernel refuses to move bytes there past the
page cache.
"""

import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case
from benchmarks.harness.table import at_least, case_table, markdown_table, mebibytes, spread
from benchmarks.transfers.methods import (
    BLOCKS,
    COPY,
    FILL,
    HUGE,
    LIBAIO,
    LIBURING,
    OURS,
    SHARDS,
    SMALL,
    Settings,
)

WORTH = 0.95  # time of a library, to ours
LIBRARIES = (LIBAIO, LIBURING)
FILE, MEMORY = (f"benchmarks.transfers.methods:measure_{what}" for what in ("file", "memory"))
DIRECTIONS = {"read": False, "write": True}


def measure(run: Run) -> None:
    """A group for each direction and size of requests, and for each work in memory."""
    settings = asdict(run.settings)
    for size in (SHARDS, BLOCKS):
        for direction, write in DIRECTIONS.items():
            how = {"settings": settings, "size": size, "write": write, "engine": OURS}
            cases = [Case(OURS, FILE, how), Case(SMALL, FILE, {**how, "huge": False})]
            cases += [Case(name, FILE, {**how, "engine": name}, peer=name) for name in LIBRARIES]
            run.group(f"{direction} {size}", cases, "rounds", turns=run.settings.rounds, warmup=1)
    for work in (FILL, COPY):
        both = (HUGE, SMALL)
        cases = [Case(name, MEMORY, {"settings": settings, "work": work, "huge": name == HUGE}) for name in both]
        run.group(f"{work} memory", cases, "rounds", turns=run.settings.rounds, warmup=1)


def report(run: Run) -> list[str]:
    """A table for each group."""
    sections = []
    for group, outcomes in run.groups.items():
        columns: dict[str, Any] = {
            "time": lambda o: f"{1e3 * o.median():.0f} ms",
            "GB/s": lambda o: f"{o.result['bytes'] / o.median() / 1e9:.2f}",
            "to ours": lambda o: spread(o.ratios()),
            "processor time": lambda o: f"{1e3 * o.median('processor'):.0f} ms",
        }
        if group.endswith("memory"):
            columns["page faults"] = lambda o: f"{o.median('faults'):,.0f}"
            columns["memory held"] = lambda o: mebibytes(o.result["held"])
        sections += [f"## {group}", case_table(outcomes, columns)]
    rows = [[name, spread(_ratios(run, name))] for name in (SMALL, *LIBRARIES) if _ratios(run, name)]
    sections += ["## all groups", markdown_table(["case", "to ours"], rows)]
    settings = run.settings
    sections.append(
        f"The file has {mebibytes(settings.file_bytes)}, and is moved past the page cache. Shards: "
        f"{settings.requests(SHARDS)[1]} requests of {mebibytes(settings.requests(SHARDS)[0])} at a time. Blocks: "
        f"{settings.requests(BLOCKS)[1]} of {mebibytes(settings.requests(BLOCKS)[0])}. {LIBURING} moves "
        f"the memory of a bytearray, here in huge pages: its plain reads take no other."
    )
    return sections


def bounds(run: Run) -> list[str]:
    """No library is so much faster that steps should be measured with it: in the median of all turns of all groups."""
    broken = []
    for name in LIBRARIES:
        ratios = _ratios(run, name)
        broken += at_least(f"{name} to ours", statistics.median(ratios), WORTH, "{:.3f}".format) if ratios else []
    return broken


def _ratios(run: Run, name: str) -> list[float]:
    """Time ratios of one method to the first one of its group, in the groups that move a file."""
    return [r for o in run.outcomes if o.name == name and o.case.target == FILE for r in o.ratios()]


BENCHMARK = Benchmark(Settings, measure, report, bounds)
