"""``pipe-ladder``: time, memory and bubble of our pipe beside torchgpipe's and fairscale's, and of each mechanism.

Two CPU stages and 1 to 16 micro-batches. One case for each number takes steps of the pipes in turn and gives the
ratios of their times, for cells of milliseconds and for tiny cells. For each pipe, and for ours with one mechanism
taken away, another case gives the peak memory. One more gives each stage a worker and measures the bubble.
"""

from dataclasses import asdict, replace
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.peers import Found, find_peer
from benchmarks.harness.schedule import Group
from benchmarks.pipe_ladder.methods import METHODS
from benchmarks.pipe_ladder.report import PIPES, TINY, report
from benchmarks.pipe_ladder.workload import Settings

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


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: time, tiny cells, peaks, bubble."""
    # Steps in turn are of one process: the ancestors that are installed here.
    names = [PIPES[0], *(name for name in PIPES[1:] if isinstance(find_peer(name), Found))]

    def case(title: str, function: str, how: dict[str, Any], environment: dict[str, str], sizes: Settings) -> Case:
        peer = title if title in PIPES[1:] else ""
        return Case(title, f"{MODULE}:{function}", {"settings": asdict(sizes), **how}, environment, peer)

    def timed(title: str, sizes: Settings, microbatches: int) -> list[Case]:
        hows = [
            {"chunks": n, "repeats": -(-microbatches // n), "names": names} for n in sizes.chunks if n <= sizes.rows
        ]
        named = ((f"{title}, {how['chunks']} micro-batches", how) for how in hows)
        return [case(name, "time_rounds", how, KEEP_PAGES, sizes) for name, how in named]

    yield Group("time", timed("time", settings, 1))
    tiny = replace(settings, **TINY, rounds=MORE_ROUNDS * settings.rounds)
    yield Group("tiny cells", timed("tiny cells", tiny, TURN_MICROBATCHES))
    yield Group("peaks", [case(name, "peak", {"name": name, "steps": 5}, GIVE_BACK, settings) for name in METHODS])
    yield Group("bubble", [case("bubble", "bubbles", {"rounds": 5}, {}, settings)])


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"threads": settings.threads})
