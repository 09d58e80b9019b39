"""``gpu-train``: full AdamW in bf16 over fp32 masters: memory on device and host, and time, of each method.

Forward and backward are those of ``memory-latency``. Made for a GPU, whose peak is that of torch's allocator; on the
CPU the same cases run with a small model, which shows that they work and nothing else.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Facts, Plan, Report, Run
from benchmarks.harness.case import FLOOR, Case, Outcome, failures
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.limits import Limits, adamw_bytes
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import METHODS
from benchmarks.models.transformer import Block, Stack

OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}  # fused: one pass over parameter, gradient and both moments
MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bf16 has eight bits
HOST_UPDATES = ("ours", "checkpointed torchao", "fairscale_offload")  # their optimizers work in host memory
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
        Case(name, "benchmarks.gpu_train.benchmark:train", {"method": method, **common}, peer=peer)
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


def _layers(stack: Stack) -> nn.Sequential:
    """The blocks with torch's default initialization, which an OffloadModel repeats for layers without memory."""
    torch.manual_seed(stack.seed)
    return nn.Sequential(*(Block(stack.dim) for _ in range(stack.blocks)))


def _ours(stack: Stack, device: str) -> tuple[Any, Any]:
    """``OffloadModel`` in host memory with an ``OffloadOptimizer`` that updates during backward."""
    from offload import OffloadModel, OffloadOptimizer

    with torch.device("meta"):  # given memory shard by shard: the bare model never exists
        layers = _layers(stack)
    options: dict[str, Any] = {"checkpoint_activation": True, "param_dtype": torch.bfloat16}
    model = OffloadModel(layers, device, "cpu", num_slices=stack.blocks, **options)
    return model, OffloadOptimizer(model, torch.optim.AdamW, update_in_backward=True, **OPTIONS)


def _theirs(stack: Stack, device: str, method: str) -> tuple[Any, Any]:
    """A method of ``memory-latency`` under autocast, with AdamW where its parameters are, or torchao's optimizer."""
    model = _layers(stack)
    settings = {"slices": stack.blocks} if method == "fairscale_offload" else {}
    prepared = METHODS[method.partition(" ")[0]](model, Path(tempfile.gettempdir()), device, **settings)
    trained = prepared.run if isinstance(prepared.run, nn.Module) else model
    if method.endswith("torchao"):  # states and gradients in host memory
        from torchao.optim import CPUOffloadOptimizer

        options = {"offload_gradients": True, **OPTIONS}
        optimizer: Any = CPUOffloadOptimizer(trained.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(trained.parameters(), **OPTIONS)

    def run(batch: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return prepared.run(batch)

    return run, optimizer


def train(report: Reporter, method: str, stack: dict[str, Any], device: str) -> dict[str, Any]:
    """A training step in each turn; the first ones also make the states of the optimizer."""
    chosen = Stack(**stack)
    report.memory(FLOOR)
    run, optimizer = _ours(chosen, device) if method == "ours" else _theirs(chosen, device, method)
    batch = chosen.batch().to(device)

    def step() -> Tensor:
        loss = run(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    report.phase("steps")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in report.turns():
        loss, values = measure(step, run, device)
        report.step(loss=float(loss), **values)
    device_peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {"device_peak": device_peak, "statistics": counts_of(run)}


def report(run: Run[Any]) -> Report:
    """One table."""
    outcomes, limits = run.outcomes, run.limits
    stack = Stack(**outcomes[0].case.arguments["stack"])
    columns = {
        "device peak": lambda o: mebibytes(o.done["device_peak"]),
        "host peak": lambda o: mebibytes(o.above()),
        "s/step": lambda o: f"{_seconds(o):.3g}",
        "tokens/s": lambda o: f"{stack.tokens / _seconds(o):,.0f}",
        **limit_columns(limits, lambda o: limit_seconds(o, stack, limits), _seconds),
        "first loss": lambda o: f"{o.steps[0]['loss']:.4f}",
        "last loss": lambda o: f"{o.steps[-1]['loss']:.4f}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:,.0f} M parameters, {stack.rows} rows of {stack.positions} "
        "tokens. bf16 arithmetic, fp32 masters, AdamW. Limits count a forward and a backward with nothing recomputed, "
        "AdamW's reads and writes where the method has its states, and what must move between host and device then."
    )
    return Report([case_table(outcomes, columns, "method"), reasons(outcomes), words], broken_bounds(outcomes))


def _seconds(outcome: Outcome) -> float:
    return float(statistics.median(step["seconds"] for step in outcome.steps[1:]))


def broken_bounds(outcomes: Sequence[Outcome]) -> list[str]:
    """Bounds that do not hold: cases run, losses are numbers, and the first ones agree."""
    broken = failures(outcomes)
    done = [outcome for outcome in outcomes if outcome.result is not None and outcome.steps]
    for outcome in done:
        losses = [step["loss"] for step in outcome.steps]
        if not all(math.isfinite(loss) for loss in losses):
            broken.append(f"{outcome.name}: losses are {losses}")
        else:
            apart = abs(losses[0] / done[0].steps[0]["loss"] - 1)
            what = f"{outcome.name}: the difference of its first loss from that of {done[0].name}"
            broken += at_most(what, apart, MAXIMUM_DIFFERENCE, "{:.1%}".format)
    return broken


def limit_seconds(outcome: Outcome, stack: Stack, limits: Limits) -> float:
    """The least seconds for the arithmetic of every method, for AdamW where this one runs it, and for what must move.

    With the optimizer in host memory gradients move there and parameters back: ours counts these bytes; of peers they
    are those of the fp32 parameters.
    """
    flops, updated = stack.training_flops, adamw_bytes(stack.parameters)
    if outcome.case.arguments["method"] not in HOST_UPDATES:
        return limits.step_seconds(flops=flops, on_device_bytes=updated)
    step, masters = outcome.steps[-1], 4.0 * stack.parameters
    loaded, stored = step.get("bytes_loaded", masters), step.get("bytes_stored", masters)
    if limits.host_to_device_bytes is None:
        return limits.step_seconds(flops=flops, copied_bytes=updated + loaded + stored)
    return limits.step_seconds(flops=flops, copied_bytes=updated, loaded_bytes=loaded, drained_bytes=stored)


BENCHMARK = Benchmark(Settings, plan, report, prepare, rates)
