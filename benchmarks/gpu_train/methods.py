"""The methods: bf16 arithmetic over fp32 masters and full AdamW, for the same model.

Each method returns a function from a batch to the loss that updates the parameters. On a GPU the device peak is that of
torch's allocator; the host peak is measured from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Block, Checkpointed, Stack

__all__ = ["FLOOR", "METHODS", "train"]

FLOOR = "interpreter and torch"
RATE = 1e-4

Step = Callable[[Tensor], Tensor]
Made = tuple[Step, Callable[[], dict[str, Any]]]
"""The step, and the statistics of an OffloadModel."""


def ours(stack: Stack, device: str) -> Made:
    """``OffloadModel`` in host memory with an ``OffloadOptimizer`` that updates during backward."""
    from offload import OffloadModel, OffloadOptimizer

    torch.manual_seed(stack.seed)
    with torch.device("meta"):  # given memory shard by shard: the bare model never exists
        layers = nn.Sequential(*(Block(stack.dim) for _ in range(stack.blocks)))
    options: dict[str, Any] = {"checkpoint_activation": True, "param_dtype": torch.bfloat16}
    model = OffloadModel(layers, device, "cpu", num_slices=stack.blocks, **options)
    # fused: one pass over parameter, gradient and both moments, in every method that has the choice.
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, update_in_backward=True, lr=RATE, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = _loss(model(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: asdict(model.statistics())


def _built(stack: Stack) -> nn.Sequential:
    """The blocks as torch draws them by default, as those of an OffloadModel made on the meta device are."""
    torch.manual_seed(stack.seed)
    return nn.Sequential(*(Block(stack.dim) for _ in range(stack.blocks)))


def resident(stack: Stack, device: str) -> Made:
    """Everything on the device, ``torch.utils.checkpoint`` around each layer."""
    model = _built(stack).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    return _plain_step(Checkpointed(model), optimizer, device), dict


def saved_on_cpu(stack: Stack, device: str) -> Made:
    """Weights and optimizer on the device, activations in host memory."""
    model = _built(stack).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device != "cpu"):
            output: Tensor = model(hidden)
        return output

    return _plain_step(forward, optimizer, device), dict


def torchao_optimizer(stack: Stack, device: str) -> Made:
    """Weights on the device, torchao's ``CPUOffloadOptimizer`` with the states and gradients in host memory."""
    from torchao.optim import CPUOffloadOptimizer

    model = _built(stack).to(device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=RATE, fused=True)
    return _plain_step(Checkpointed(model), optimizer, device), dict


def fairscale_offload(stack: Stack, device: str) -> Made:
    """fairscale's OffloadModel, one layer a slice, and AdamW in host memory."""
    from fairscale.experimental.nn.offload import OffloadModel as Theirs

    places = {"device": torch.device(device), "offload_device": torch.device("cpu")}
    model = Theirs(_built(stack), **places, num_slices=stack.blocks, checkpoint_activation=True)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    return _plain_step(model, optimizer, device), dict


METHODS: dict[str, Callable[[Stack, str], Made]] = {
    method.__name__: method for method in (ours, resident, saved_on_cpu, torchao_optimizer, fairscale_offload)
}


def train(report: Reporter, method: str, stack: dict[str, Any], device: str) -> dict[str, Any]:
    """A training step in each turn; the first ones also make the states of the optimizer."""
    chosen = Stack(**stack)
    report.memory(FLOOR)
    step, statistics = METHODS[method](chosen, device)
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
