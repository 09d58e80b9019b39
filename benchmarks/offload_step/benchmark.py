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
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.offload_step.report import report

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

    def peaks(name: str, blocks: dict[int, int]) -> list[Case]:
        cases = []
        for shards, count in blocks.items():
            # A peak is a maximum over visits of shards: deeper models get no more visits than others.
            steps = 2 if count > 1 else 2 * layers // shards
            arguments = {**shape(shards, count), "steps": steps}
            cases.append(Case(f"{name}, {shards} shards", f"{METHODS}:peak", arguments, GIVE_BACK))
        return cases

    layers = max(settings.shards)
    timed = {**shape(TIMED_SHARDS, 1), "pairs": settings.pairs, "warmup": 2}
    deeper = peaks("1 layer each", dict.fromkeys(settings.shards, 1))
    yield Group("time", [Case(f"time, {TIMED_SHARDS} shards", f"{METHODS}:time_pairs", timed)])
    yield Group("finer", peaks(f"{layers} layers", {shards: layers // shards for shards in settings.shards}))
    yield Group("deeper", deeper)
    deepest = deeper[-1]
    yield Group("allocator", [Case(f"{deepest.name}, allocator as it comes", deepest.target, deepest.arguments)])
    in_slots = {**timed, "home": "cpu", "slots": TIMED_SHARDS}
    yield Group("engine", [Case("all in slots", f"{METHODS}:time_pairs", in_slots)])
    disk = {"width": settings.width, "layers": 32, "shards": 16, "rows": 1, "pairs": settings.pairs}
    names = {False: "disk, inputs take gradients", True: "disk, weights take gradients"}
    yield Group(
        "disk",
        [
            Case(name, f"{METHODS}:stream", {"home": f"{folder}/{train}", "train": train, **disk})
            for train, name in names.items()
        ],
    )


BENCHMARK = Benchmark(Settings, plan, report)
