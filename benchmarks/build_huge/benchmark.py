"""``build-huge``: builds, loads and trains a model whose parameters alone exceed the memory cap of its process.

Three cases train the same model from the same files, a step of each in a round. The resident one without a cap gives
the reference losses; the resident one under the cap fails; the offloaded one must train under the cap to these losses.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.build_huge.report import CAPPED, OFFLOADED, REFERENCE, report
from benchmarks.build_huge.workload import Shape, write_weights
from benchmarks.harness.benchmark import Benchmark, Facts, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.harness.table import mebibytes

#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
METHODS = "benchmarks.build_huge.workload"


@dataclass(frozen=True)
class Settings:
    """The cap and the sizes."""

    cap: int = option(768, "MiB of private memory (RLIMIT_DATA) of the capped cases")
    dim: int = option(1024, "channels; a block has 8 dim^2 parameters")
    blocks: int = option(36, "blocks, each of which is one shard")
    rows: int = option(64, "rows of the batch")
    steps: int = option(9, "steps of AdamW")

    def wrong(self) -> list[str]:
        """A model that fits answers nothing."""
        held = shape_of(self).parameter_bytes
        if held > self.cap << 20:
            return []
        return [
            f"expected parameters larger than the cap, got {mebibytes(held)} under a cap of {self.cap:,} MiB; "
            "pass more --blocks or a smaller --cap"
        ]


def shape_of(settings: Settings) -> Shape:
    """The model and its batch."""
    return Shape(settings.blocks, settings.dim, settings.rows, settings.steps)


def plan(settings: Settings, folder: str) -> Plan:
    """One group."""
    common = {"shape": asdict(shape_of(settings)), "weights": f"{folder}/weights"}

    def case(name: str, function: str, cap: int | None, environment: Mapping[str, str], **more: Any) -> Case:
        return Case(name, f"{METHODS}:{function}", {**common, "cap_bytes": cap, **more}, environment)

    cap = settings.cap << 20
    ours = case(OFFLOADED, "offloaded", cap, GIVE_BACK, home=f"{folder}/home")
    cases = [case(REFERENCE, "resident", None, {}), case(CAPPED, "resident", cap, GIVE_BACK), ours]
    yield Group("training", cases, "rounds", settings.steps)


def prepare(settings: Settings, folder: Path) -> Facts:
    """Writes the weights."""
    if not sys.platform.startswith("linux"):
        raise ValueError(f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}")
    weights = folder / "weights"
    weights.mkdir()
    shape = shape_of(settings)
    stored = write_weights(weights, shape)
    return [
        ("model", f"{mebibytes(shape.parameter_bytes)} of float32 parameters in {shape.blocks} shards, AdamW"),
        ("weights", f"{mebibytes(stored)} of bfloat16 in {shape.blocks} safetensors files with an index"),
        ("cap", f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings"),
    ]


BENCHMARK = Benchmark(Settings, plan, report, prepare)
