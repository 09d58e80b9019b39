"""``gpu-train``: full AdamW over fp32 masters: memory on device and host, and time, of each method.

Forward and backward are those of ``memory-latency``. Made for a GPU, whose peak is that of torch's allocator; on the
CPU the same cases run with a small model, which shows that they work and nothing else.
"""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_train.methods import OURS
from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes
from benchmarks.models.transformer import Stack
from benchmarks.models.work import adamw_bytes

MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bf16 has eight bits
HOST_UPDATES = ("ours", "planned", "checkpointed torchao", "fairscale_offload")  # their optimizers work in host memory
PLANNED_AFTER = 4  # steps, in which plans are chosen
NAMED: list[tuple[str, str, str]] = [  # name, method of ``memory-latency`` and optimizer, peer
    ("ours: OffloadModel, OffloadOptimizer", "ours", ""),
    ("torch, all on the device", "plain", ""),
    ("torch, all on the device, checkpoint", "checkpointed", ""),
    ("torch, save_on_cpu", "saved_on_cpu", ""),
    ("torchao CPUOffloadOptimizer, checkpoint", "checkpointed torchao", "torchao"),
    ("fairscale OffloadModel", "fairscale_offload", "fairscale"),
]


@dataclass(frozen=True)
class Settings:
    """Sizes, the device, the number of steps, and which cases."""

    device: str = option("cuda", "where layers compute")
    layers: int = option(12, "transformer blocks")
    dim: int = option(1024, "channels", multiple=64)
    rows: int = option(8, "rows of the batch")
    positions: int = option(512, "tokens of a row")
    dtype: str = option("bfloat16", "in which layers compute", choices=("bfloat16", "float32"))
    memory: tuple[str, ...] = option(("auto",), "ours plans with each of these as memory=, and homes in host memory")
    steps: int = option(8, "of which the first four are not timed, in which plans are chosen", least=5)
    only: tuple[str, ...] = option(("",), "only cases with one of these in their names")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: this machine may lack the device."""
        if torch.device(self.device).type != "cuda" or torch.cuda.is_available():
            return ""
        return f"expected a device of this machine, got device={self.device!r}; --device cpu runs anywhere"


def measure(run: Run) -> None:
    """Runs all cases as one group, each alone on the device."""
    settings = run.settings
    stack = Stack(settings.layers, settings.dim, settings.rows, settings.positions)
    cases = []
    planned = [(f"ours, memory={memory!r}", "planned", "") for memory in settings.memory]
    for name, method, peer in [*NAMED[:1], *planned, *NAMED[1:]]:
        if any(word in name for word in settings.only):
            how = {"method": method, "stack": asdict(stack), "device": settings.device, "dtype": settings.dtype}
            how |= {"memory": name.split("'")[1]} if method == "planned" else {}
            # With the optimizer in host memory gradients move there and parameters back: those of peers are fp32.
            updated, masters = adamw_bytes(stack.parameters), 4.0 * stack.parameters
            work = {"copied_bytes": updated} if method in HOST_UPDATES else {"on_device_bytes": updated}
            if method in HOST_UPDATES and method not in OURS:  # ours counts these bytes
                work |= {"loaded_bytes": masters, "drained_bytes": masters}
            work["flops"] = stack.training_flops
            cases.append(Case(name, "benchmarks.gpu_train.methods:train", how, peer=peer, work=work))
    run.group("training", cases, turns=settings.steps)


def rates(settings: Settings) -> dict[str, Any]:
    """bf16 rates; small sizes on a CPU."""
    size = {"file_bytes": 32 << 20, "side": 256} if settings.device == "cpu" else {"side": 8192}
    return {"device": settings.device, "dtype": settings.dtype, **size}


def report(run: Run) -> list[str]:
    """One table."""
    stack = Stack(**run.outcomes[0].case.arguments["stack"])
    columns = {
        "device peak": lambda o: mebibytes(o.result["device_peak"]),
        "host peak": lambda o: mebibytes(o.above()),
        "s/step": lambda o: f"{_seconds(o):.3g}",
        "tokens/s": lambda o: f"{stack.tokens / _seconds(o):,.0f}",
        **limit_columns(run.rates, _moved, _seconds),
        "first loss": lambda o: f"{o.steps[0]['loss']:.4f}",
        "last loss": lambda o: f"{o.steps[-1]['loss']:.4f}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:,.0f} M parameters, {stack.rows} rows of {stack.positions} "
        f"tokens. {run.settings.dtype} arithmetic, fp32 masters, AdamW. Limits count a forward and a backward with "
        "nothing recomputed, AdamW's reads and writes where the method has its states, and what must move between host "
        "and device then."
    )
    return [case_table(run.outcomes, columns, "method"), words]


def _seconds(outcome: Outcome) -> float:
    return float(statistics.median(outcome.values("seconds")[PLANNED_AFTER:]))


def _moved(outcome: Outcome) -> dict[str, float]:
    """Bytes that ours has moved between host and device, in words."""
    step = outcome.steps[-1]
    moved = {"loaded_bytes": "bytes_loaded", "drained_bytes": "bytes_stored"}
    return {kind: step[counter] for kind, counter in moved.items() if counter in step}


def bounds(run: Run) -> list[str]:
    """Losses are numbers, and the first ones agree."""
    broken = []
    done = [outcome for outcome in run.outcomes if outcome.result is not None]
    for outcome in done:
        losses = outcome.values("loss")
        if not all(math.isfinite(loss) for loss in losses):
            broken.append(f"{outcome.name}: losses are {losses}")
        else:
            apart = abs(losses[0] / done[0].steps[0]["loss"] - 1)
            what = f"{outcome.name}: the difference of its first loss from that of {done[0].name}"
            broken += at_most(what, apart, MAXIMUM_DIFFERENCE, "{:.1%}".format)
    return broken


BENCHMARK = Benchmark(Settings, measure, report, bounds, rates=rates)
