"""The methods: the same transformer blocks resident or streamed from files.

The resident model has ``torch.utils.checkpoint`` around each shard. It recomputes what the streamed model recomputes,
so the ratio of the two is the price of streaming.
"""

import contextlib
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR
from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Checkpointed, Stack
from offload import MemoryPolicy, OffloadModel


def stack_of(shape: dict[str, Any]) -> Stack:
    """The blocks, each of which is a shard, and the batch."""
    return Stack(shape["shards"], shape["dim"], shape["rows"], shape["positions"], dropout=0.1)


def _streamed(shape: dict[str, Any], home: str, slots: int | None = None) -> OffloadModel:
    return OffloadModel(
        list(stack_of(shape).build()),
        "cpu",
        offload_device=home,
        checkpoint_activation=True,
        memory=MemoryPolicy.fixed(slots=slots, boundary_bytes=shape["boundary_bytes"]),
    )


def _step(model: nn.Module, state: Any) -> tuple[float, Tensor]:
    """Seconds of one forward and backward, and the loss."""
    model.zero_grad()
    started = time.perf_counter()
    loss = model(state)[0].square().mean()
    loss.backward()
    return time.perf_counter() - started, loss.detach()


def time_pairs(
    report: Reporter, shape: dict[str, Any], home: str, pairs: int, warmup: int, slots: int | None = None
) -> dict[str, Any]:
    """Steps of the resident and of the streamed model in turn; which one starts alternates.

    With as many ``slots`` as shards nothing is loaded after the first step: the ratio is the price of the engine alone.
    """
    state = stack_of(shape).batch()
    model = _streamed(shape, home, slots)
    methods = {"resident": Checkpointed(stack_of(shape).build()), "streamed": model}
    # Without this promise that parameters do not change, each step would load them again.
    with model.frozen_weights() if slots is not None else contextlib.nullcontext():
        for k in range(-warmup, pairs):
            seconds, losses = {}, {}
            before = model.statistics()
            for method in sorted(methods, reverse=k % 2 == 1):
                seconds[method], losses[method] = _step(methods[method], state)
            after = model.statistics()
            if not torch.allclose(losses["resident"], losses["streamed"], rtol=1e-6):
                raise AssertionError(f"the two models do not compute the same loss: {losses}")
            if k >= 0:
                report.step(
                    **seconds,
                    ratio=seconds["streamed"] / seconds["resident"],
                    waited=after.wait_seconds - before.wait_seconds,
                    loads=after.shard_loads - before.shard_loads,
                )
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": stack_of(shape).tokens,
        "statistics": asdict(model.statistics()),
    }


def peak(report: Reporter, shape: dict[str, Any], home: str, steps: int) -> dict[str, Any]:
    """Steps of the streamed model alone, for the peak of the phase "steps", which starts with an evicted model."""
    report.phase(FLOOR)
    model = _streamed(shape, home)
    state = stack_of(shape).batch()
    report.phase("steps")
    for _ in range(steps):
        seconds, _ = _step(model, state)
        report.step(seconds=seconds)
    report.phase("end")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "statistics": asdict(model.statistics()),
    }
