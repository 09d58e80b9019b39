"""Time that the engine takes beside layers, counted in Python calls of the caller's thread, which no load disturbs."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import OffloadModel, OffloadOptimizer

BLOCKS, WARM_UP, PROFILED = 16, 14, 3


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(BLOCKS)))


def calls_in(step: Callable[[], object]) -> float:
    """Python calls of the caller's thread in a step."""
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of others would count
    try:
        profile.enable()
        for _ in range(PROFILED):
            step()
        profile.disable()
    finally:
        gc.enable()
    counted: Any = pstats.Stats(profile)
    return float(counted.total_calls) / PROFILED


def calls_of(step: Callable[[], object]) -> float:
    """Calls in a step for each block."""
    for _ in range(WARM_UP):
        step()
    return calls_in(step) / BLOCKS


@pytest.fixture(scope="module")
def checkpointed() -> float:
    """Calls of ``torch.utils.checkpoint``."""
    layers, x = blocks(), torch.randn(4, 16)

    def step() -> None:
        value: Tensor = x
        for layer in layers:
            value = checkpoint(layer, value, use_reentrant=False)
        value.mean().backward()

    return calls_of(step)


@pytest.mark.parametrize(
    ("home", "microbatches", "most"), [("memory", 1, 1.35), ("memory", 4, 1.35), ("files", 4, 1.35)]
)
def test_a_recomputed_block_takes_few_more_calls_than_a_checkpoint_of_torch(
    checkpointed: float, home: str, microbatches: int, most: float, tmp_path: Path
) -> None:
    model = OffloadModel(
        blocks(),
        "cpu",
        tmp_path if home == "files" else "cpu",
        num_slices=BLOCKS,
        checkpoint_activation=True,
        num_microbatches=microbatches,
    )
    x = torch.randn(4, 16)
    assert calls_of(lambda: model(x).mean().backward()) / microbatches <= most * checkpointed


class OwnForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("kind", "named"), [(blocks, None), (OwnForward, "layers")], ids=["sequential", "own-forward"])
def test_a_step_in_which_everything_stays_takes_at_most_twice_the_calls_of_the_plain_one_and_30(
    kind: Callable[[], nn.Module], named: str | None, tmp_path: Path
) -> None:
    plain, x = kind(), torch.randn(4, 16)
    model = OffloadModel(kind(), "cpu", tmp_path, blocks=named, memory="1GiB")
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    ours = OffloadOptimizer(model, torch.optim.AdamW, fused=True)

    def step(layers: nn.Module, optimizer: torch.optim.Optimizer | OffloadOptimizer) -> Tensor:
        loss: Tensor = layers(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(WARM_UP):
        assert torch.equal(step(model, ours), step(plain, theirs))
    assert calls_in(lambda: step(model, ours)) <= 2 * calls_in(lambda: step(plain, theirs)) + 30 * BLOCKS
    assert torch.equal(step(model, ours), step(plain, theirs))
