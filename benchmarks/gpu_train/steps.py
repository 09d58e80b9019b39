"""The rungs: bf16 arithmetic over fp32 masters, full AdamW, in every way that takes the same model.

Each way gives one function: a step from a batch to its loss, parameters updated. On a GPU the peak is that of torch's
allocator; what the process holds on the host is measured from outside, as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frame.child import Report
from benchmarks.memory_latency.shape import Block, Shape

__all__ = ["FLOOR", "WAYS", "train"]

FLOOR = "interpreter and torch"
RATE = 1e-4

Step = Callable[[Tensor], Tensor]
Statistics = Callable[[], dict[str, Any]]


def ours(shape: Shape, device: str) -> tuple[Step, Statistics]:
    """``OffloadModel`` with a home in host memory, ``OffloadOptimizer`` that updates while backward goes on."""
    from offload import OffloadModel, OffloadOptimizer

    torch.manual_seed(shape.seed)
    with torch.device("meta"):  # given memory shard by shard: the bare model never exists
        layers = nn.Sequential(*(Block(shape.dim) for _ in range(shape.layers)))
    model = OffloadModel(
        layers,
        device,
        "cpu",
        num_slices=shape.layers,
        checkpoint_activation=True,
        param_dtype=torch.bfloat16,
    )
    # fused: one pass over parameter, gradient and both moments, in every way that has the choice.
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, update_in_backward=True, lr=RATE, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: asdict(model.statistics())


def resident(shape: Shape, device: str) -> tuple[Step, Statistics]:
    """Everything on the device, ``torch.utils.checkpoint`` around each layer."""
    model = shape.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    return _plain_step(_checkpointed(model), optimizer, device), dict


def saved_on_cpu(shape: Shape, device: str) -> tuple[Step, Statistics]:
    """Weights and optimizer on the device, activations in host memory."""
    model = shape.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            output: Tensor = model(hidden)
        return output

    return _plain_step(forward, optimizer, device), dict


def torchao_optimizer(shape: Shape, device: str) -> tuple[Step, Statistics]:
    """Weights on the device, torchao's ``CPUOffloadOptimizer`` with the states and gradients in host memory."""
    from torchao.optim import CPUOffloadOptimizer

    model = shape.build().to(device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=RATE, fused=True)

    return _plain_step(_checkpointed(model), optimizer, device), dict


def fairscale_offload(shape: Shape, device: str) -> tuple[Step, Statistics]:
    """fairscale's OffloadModel, one layer a slice, and AdamW in host memory."""
    from fairscale.experimental.nn.offload import OffloadModel as Theirs

    model = Theirs(
        shape.build(),
        device=torch.device(device),
        offload_device=torch.device("cpu"),
        num_slices=shape.layers,
        checkpoint_activation=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    return _plain_step(model, optimizer, device), dict


WAYS: dict[str, Callable[[Shape, str], tuple[Step, Statistics]]] = {
    way.__name__: way for way in (ours, resident, saved_on_cpu, torchao_optimizer, fairscale_offload)
}


def train(report: Report, way: str, shape: dict[str, Any], device: str) -> dict[str, Any]:
    """A training step for each turn; the first ones also make the states of the optimizer."""
    chosen = Shape(**shape)
    report.memory(FLOOR)
    step, statistics = WAYS[way](chosen, device)
    batch = chosen.batch().to(device)
    report.phase("steps")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    counted: dict[str, Any] = {}
    for _ in report.turns():
        before = statistics()
        started = time.perf_counter()
        loss = float(step(batch))  # waits for the device
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        counted = statistics()
        moved = {name: counted[name] - before[name] for name in ("bytes_loaded", "bytes_stored") if name in counted}
        report.step(seconds=seconds, loss=loss, **moved)
    return {"device_peak": torch.cuda.max_memory_allocated(device) if on_gpu else 0, "statistics": counted}


def _checkpointed(model: nn.Sequential) -> Step:
    def forward(hidden: Tensor) -> Tensor:
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden

    return forward


def _plain_step(forward: Step, optimizer: Any, device: str) -> Step:
    kind = torch.device(device).type

    def step(batch: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            output = forward(batch)
        loss = _loss(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _loss(output: Tensor) -> Tensor:
    return output.float().square().mean()
