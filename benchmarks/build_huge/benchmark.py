"""``build-huge``: builds, loads and trains a model whose parameters alone exceed the memory cap of its process.

Three cases train the same model from the same files, a step of each in a round. The resident one without a cap gives
the reference losses; the resident one under the cap fails; the offloaded one must train under the cap to these losses.
"""

import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.build_huge.report import CAPPED, OFFLOADED, REFERENCE, report
from benchmarks.build_huge.workload import Settings, write_weights
from benchmarks.harness.benchmark import Benchmark, Facts, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.table import mebibytes

#: glibc raises the size from which blocks are mapped, and then keeps what was freed in its heap, which the cap counts.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def plan(settings: Settings, folder: str) -> Plan:
    """One group."""
    cases = []
    for name, offloaded, capped in ((REFERENCE, False, False), (CAPPED, False, True), (OFFLOADED, True, True)):
        how = {"offloaded": offloaded, "capped": capped, "settings": asdict(settings), "weights": f"{folder}/weights"}
        cases.append(Case(name, "benchmarks.build_huge.workload:train", how, GIVE_BACK if capped else {}))
    yield Group("training", cases, "rounds", settings.steps)


def prepare(settings: Settings, folder: Path) -> Facts:
    """Writes the weights."""
    if not sys.platform.startswith("linux"):
        raise ValueError(f"expected Linux, whose RLIMIT_DATA counts mappings too, got {sys.platform}")
    weights = folder / "weights"
    weights.mkdir()
    stored = write_weights(weights, settings)
    return [
        ("model", f"{mebibytes(settings.parameter_bytes)} of float32 parameters in {settings.blocks} shards, AdamW"),
        ("weights", f"{mebibytes(stored)} of bfloat16 in {settings.blocks} safetensors files with an index"),
        ("cap", f"RLIMIT_DATA of {settings.cap:,} MiB, which counts heap, stacks and private mappings"),
    ]


BENCHMARK = Benchmark(Settings, plan, report, prepare)
