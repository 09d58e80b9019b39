"""``pipe-ladder``: time, memory and bubble of our pipe beside torchgpipe's and fairscale's, and of each mechanism.

Two CPU stages and 1 to 16 micro-batches. One case for each number takes steps of the pipes in turn and gives the
ratios of their times, for cells of milliseconds and for tiny cells. For each pipe, and for ours with one mechanism
taken away, another case gives the peak memory. One more gives each stage a worker and measures the bubble.
"""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.peers import Found, find_peer
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.pipe_ladder.methods import METHODS
from benchmarks.pipe_ladder.report import PIPES, TINY, report
from benchmarks.pipe_ladder.workload import Shape

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


@dataclass(frozen=True)
class Settings:
    """Sizes, and how often to measure."""

    dim: int = option(384, "channels")
    blocks: int = option(4, "blocks of four layers", least=2)
    rows: int = option(1024, "rows of the mini-batch")
    chunks: tuple[int, ...] = option((1, 2, 4, 8, 16), "numbers of micro-batches")
    rounds: int = option(7, "steps of each pipe")
    threads: int = option(1, "threads of torch's kernels")

    def wrong(self) -> list[str]:
        """More micro-batches than rows."""
        if max(self.chunks) <= self.rows:
            return []
        return [f"expected from 1 to {self.rows} micro-batches, got chunks={self.chunks}"]


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: time, tiny cells, peaks, bubble."""
    shape = asdict(Shape(settings.dim, settings.blocks, settings.rows, settings.threads))
    # Steps in turn are of one process: the ancestors that are installed here.
    names = [PIPES[0], *(name for name in PIPES[1:] if isinstance(find_peer(name), Found))]

    def timed(title: str, sizes: dict[str, Any], rounds: int, microbatches: int) -> list[Case]:
        common = {"shape": sizes, "names": names, "rounds": rounds}
        return [
            Case(
                f"{title}, {chunks} micro-batches",
                f"{MODULE}:time_rounds",
                {"chunks": chunks, "repeats": -(-microbatches // chunks), **common},
                KEEP_PAGES,
            )
            for chunks in settings.chunks
            if chunks <= sizes["rows"]
        ]

    def peak(name: str) -> Case:
        arguments = {"name": name, "shape": shape, "chunks": max(settings.chunks), "steps": 5}
        return Case(name, f"{MODULE}:peak", arguments, GIVE_BACK, name if name in PIPES[1:] else "")

    bubble = {"shape": shape, "chunks": list(settings.chunks), "rounds": 5}
    yield Group("time", timed("time", shape, settings.rounds, 1))
    tiny = timed("tiny cells", shape | TINY, MORE_ROUNDS * settings.rounds, TURN_MICROBATCHES)
    yield Group("tiny cells", tiny)
    yield Group("peaks", [peak(name) for name in METHODS])
    yield Group("bubble", [Case("bubble", f"{MODULE}:bubbles", bubble)])


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"threads": settings.threads})
