"""``gpu-train``: full AdamW in bf16 over fp32 masters: memory on device and host, and time, of each method.

Made for a GPU; on the CPU the same cases run with a small model, which shows that they work and nothing else.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_train.report import report
from benchmarks.harness.benchmark import Benchmark, Facts, Plan
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.models.transformer import Stack

NAMED: list[tuple[str, str, str]] = [  # name, method of ``memory-latency`` and optimizer, peer
    ("ours: OffloadModel, OffloadOptimizer", "ours", ""),
    ("torch, all on the device, checkpoint", "checkpointed", ""),
    ("torch, save_on_cpu", "saved_on_cpu", ""),
    ("torchao CPUOffloadOptimizer, checkpoint", "checkpointed torchao", "torchao"),
    ("fairscale OffloadModel", "fairscale_offload", "fairscale-offload"),
]


@dataclass(frozen=True)
class Settings:
    """Sizes, the device, the number of steps, and which cases."""

    device: str = option("cuda", "where layers compute")
    layers: int = option(12, "transformer blocks")
    dim: int = option(1024, "channels", multiple=64)
    rows: int = option(8, "rows of the batch")
    positions: int = option(512, "tokens of a row")
    steps: int = option(4, "of which the first is not timed", least=2)
    only: tuple[str, ...] = option(("",), "only cases with one of these in their names")


def plan(settings: Settings, folder: str) -> Plan:
    """One group, each case alone on the device."""
    stack = Stack(settings.layers, settings.dim, settings.rows, settings.positions)
    common = {"stack": asdict(stack), "device": settings.device}
    cases = [
        Case(name, "benchmarks.gpu_train.methods:train", {"method": method, **common}, peer=peer)
        for name, method, peer in NAMED
        if any(word in name for word in settings.only)
    ]
    yield Group("training", cases, turns=settings.steps)


def prepare(settings: Settings, folder: Path) -> Facts:
    """Refuses a device that this machine does not have."""
    if torch.device(settings.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"expected a device of this machine, got device={settings.device!r}; --device cpu runs anywhere"
        )
    return []


def rates(settings: Settings) -> dict[str, Any]:
    """bf16 rates; small sizes on a CPU."""
    size = {"file_bytes": 32 << 20, "side": 256} if settings.device == "cpu" else {"side": 8192}
    return {"device": settings.device, "dtype": torch.bfloat16, **size}


BENCHMARK = Benchmark(Settings, plan, report, prepare, rates)
