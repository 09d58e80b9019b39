"""The cases of ``gpu``: the CUDA tests; ours, and the methods of ``memory-latency`` with an optimizer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR, CannotRunError
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.worker import Reporter
from benchmarks.memory_latency.methods import METHODS
from benchmarks.models.transformer import Block, Stack

OURS = ("ours", "planned")
ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}  # fused: one pass over parameter, gradient and both moments


#: A test file that cannot be imported affects only itself, and what another version of torch deprecates is no failure.
TEST_OPTIONS = [
    "-q",
    "-n",
    "5",
    "--dist",
    "load",
    "-k",
    "cuda",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "--continue-on-collection-errors",
]
LAST_LINES = 12  # of what the tests print, for the page


def run_tests(report: Reporter, paths: list[str]) -> dict[str, Any]:
    """Runs the CUDA tests below ``paths``, from the root of the clone; its only step holds their last lines."""
    command = [sys.executable, "-m", "pytest", *TEST_OPTIONS, *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    report.step(tail="\n".join(lines[-LAST_LINES:]))
    if done.returncode:
        raise RuntimeError(
            f"pytest ended with status {done.returncode}: {lines[-1] if lines else 'it printed nothing'}"
        )
    return {}


def _layers(stack: Stack) -> nn.Sequential:
    """The blocks with torch's default initialization, which an OffloadModel repeats for layers without memory."""
    torch.manual_seed(stack.seed)
    return nn.Sequential(*(Block(stack.dim) for _ in range(stack.blocks)))


def _autocast(run: Callable[[Tensor], Tensor], device: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def called(batch: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            return run(batch)

    return called


def _ours(stack: Stack, device: str, dtype: torch.dtype, memory: str | None) -> tuple[Any, Any, Any]:
    """``OffloadModel`` in host memory: planned for ``memory``; or with the least, and updates during backward.

    With all memory under autocast, as the others: what is cast to a slot cannot rest on the device.
    """
    from offload import OffloadModel, OffloadOptimizer

    with torch.device("meta"):  # given memory shard by shard: the bare model never exists
        layers = _layers(stack)
    options: dict[str, Any] = {"num_slices": stack.blocks, "checkpoint_activation": True}
    options = options if memory is None else {"memory": memory}
    if memory != "auto":
        options["param_dtype"] = None if dtype is torch.float32 else dtype
    model = OffloadModel(layers, device, "cpu", **options)
    run = _autocast(model, device, dtype) if memory == "auto" else model
    return run, model, OffloadOptimizer(model, torch.optim.AdamW, update_in_backward=memory is None, **OPTIONS)


def _theirs(stack: Stack, device: str, dtype: torch.dtype, method: str) -> tuple[Any, Any, Any]:
    """A method of ``memory-latency`` under autocast, with AdamW where its parameters are, or torchao's optimizer."""
    if method.endswith("torchao") and device == "cpu":
        raise CannotRunError("torchao's optimizer needs a GPU: it copies in CUDA streams")
    model = _layers(stack)
    settings = {"slices": stack.blocks} if method == "fairscale_offload" else {}
    prepared = METHODS[method.partition(" ")[0]](model, Path(), device, **settings)
    trained = prepared.run if isinstance(prepared.run, nn.Module) else model
    if method.endswith("torchao"):  # states and gradients in host memory
        from torchao.optim import CPUOffloadOptimizer

        options = {"offload_gradients": True, **OPTIONS}
        optimizer: Any = CPUOffloadOptimizer(trained.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(trained.parameters(), **OPTIONS)
    return _autocast(prepared.run, device, dtype), trained, optimizer


def train(
    report: Reporter, method: str, stack: dict[str, Any], device: str, dtype: str, memory: str | None = None
) -> dict[str, Any]:
    """A training step in each turn; the first ones also make the states of the optimizer."""
    chosen, computes = Stack(**stack), getattr(torch, dtype)
    report.phase(FLOOR)
    ours = method in OURS
    made = _ours(chosen, device, computes, memory) if ours else _theirs(chosen, device, computes, method)
    run, model, optimizer = made
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
        loss, values = measure(step, model, device)
        report.step(loss=float(loss), **values)
    device_peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return {"device_peak": device_peak, "statistics": counts_of(model)}
