"""The rungs: forward and backward of the same transformer blocks, resident or streamed from files.

The reference is what a user without this project would run: the whole model in memory, ``torch.utils.checkpoint``
around each shard. It recomputes exactly what the streamed model recomputes, so the ratio of the two is the price of
streaming and of nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frame.child import Report
from benchmarks.retrieval.dropout import RowDropout, row_keys
from benchmarks.retrieval.encoder import Block, State

__all__ = ["FLOOR", "Shape", "peak", "time_pairs"]

FLOOR = "interpreter and torch"


@dataclass(frozen=True)
class Shape:
    """A model and its input: ``shards`` shards of ``blocks`` transformer blocks each."""

    shards: int
    blocks: int
    dim: int
    rows: int
    positions: int
    boundary_bytes: int
    seed: int = 0

    def build(self) -> list[nn.Module]:
        """The shards, the same for the same shape."""
        torch.manual_seed(self.seed)
        layers = self.shards * self.blocks
        built = [
            Block(self.dim, (RowDropout(0.1, 2 * k), RowDropout(0.1, 2 * k + 1)), scale=(2 * layers) ** -0.5)
            for k in range(layers)
        ]
        return [nn.Sequential(*built[j * self.blocks : (j + 1) * self.blocks]) for j in range(self.shards)]

    def state(self) -> State:
        """What enters the first shard."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden = torch.randn(self.rows, self.positions, self.dim, generator=generator)
        mask = torch.ones(self.rows, self.positions, dtype=torch.bool)
        return hidden, mask, row_keys(self.seed, 0, 0, self.rows)


def _step(run: Callable[[State], State], parameters: list[nn.Parameter], state: State) -> tuple[float, Tensor]:
    """Seconds of one forward and backward, and the loss."""
    for parameter in parameters:
        parameter.grad = None
    started = time.perf_counter()
    loss = run(state)[0].square().mean()
    loss.backward()
    return time.perf_counter() - started, loss.detach()


def _streamed(shards: list[nn.Module], shape: Shape, home: str, slots: int | None = None) -> Any:
    from offload import OffloadModel

    return OffloadModel(
        shards,
        "cpu",
        offload_device=home,
        checkpoint_activation=True,
        boundary_bytes=shape.boundary_bytes,
        num_slots=slots,
    )


def time_pairs(
    report: Report, shape: dict[str, Any], home: str, pairs: int, warmup: int, slots: int | None = None
) -> dict[str, Any]:
    """Steps of the resident and of the streamed model in turn, so that a slow minute of the machine hits both.

    The order within a pair alternates: neither always runs on the caches that the other one left. With as many
    ``slots`` as shards nothing is loaded after the first step, and the ratio is the price of the engine alone.
    """
    chosen = Shape(**shape)
    state = chosen.state()
    resident = chosen.build()
    model = _streamed(chosen.build(), chosen, home, slots)

    def checkpointed(state: State) -> State:
        for shard in resident:
            state = checkpoint(shard, state, use_reentrant=False)
        return state

    ways: dict[str, tuple[Callable[[State], State], list[nn.Parameter]]] = {
        "resident": (checkpointed, [parameter for shard in resident for parameter in shard.parameters()]),
        "streamed": (model, list(model.parameters())),
    }
    report.total(pairs)
    with contextlib.ExitStack() as stack:
        if slots is not None:
            # Said by a user who changes no parameters meanwhile. Without this, each step loads them anew, since they
            # might have been changed.
            stack.enter_context(model.frozen_weights())
        for k in range(-warmup, pairs):
            seconds, losses = {}, {}
            before = model.statistics()
            for way in sorted(ways, reverse=k % 2 == 1):
                seconds[way], losses[way] = _step(*ways[way], state)
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
        "tokens": chosen.rows * chosen.positions,
        "predicted": model.estimate(chosen.rows).seconds,
        "statistics": asdict(model.statistics()),
    }


def peak(report: Report, shape: dict[str, Any], home: str, steps: int) -> dict[str, Any]:
    """Steps of the streamed model alone, for its peak; the phase "steps" begins when the model has gone home."""
    report.memory(FLOOR)
    chosen = Shape(**shape)
    model = _streamed(chosen.build(), chosen, home)
    state, parameters = chosen.state(), list(model.parameters())
    report.total(steps)
    report.memory("before the first step")
    report.phase("steps")
    for _ in range(steps):
        seconds, _ = _step(model, parameters, state)
        report.step(seconds=seconds)
    report.phase("end")
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "statistics": asdict(model.statistics()),
    }
