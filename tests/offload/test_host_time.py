"""Time that the engine takes beside layers, counted in Python calls of the caller's thread, which no load disturbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.host_time import WARM_UP, calls_in, layers
from benchmarks.host_time import checkpointed as checkpointed_by_torch
from offload import OffloadModel, OffloadOptimizer
from tests.offload.zoo import OwnForward

BLOCKS = 16


def blocks() -> nn.Sequential:
    return layers(BLOCKS)


def calls_of(step: Callable[[], object]) -> float:
    """Calls in a step for each block."""
    for _ in range(WARM_UP):
        step()
    return calls_in(step) / BLOCKS


@pytest.fixture(scope="module")
def checkpointed() -> float:
    """Calls of ``torch.utils.checkpoint``."""
    model, x = blocks(), torch.randn(4, 16)
    return calls_of(lambda: checkpointed_by_torch(model, x).mean().backward())


@pytest.mark.parametrize(
    ("home", "microbatches", "most"), [("memory", 1, 1.3), ("memory", 4, 1.3), ("files", 1, 1.6), ("files", 4, 1.3)]
)
def test_a_recomputed_block_takes_few_more_calls_than_a_checkpoint_of_torch(
    checkpointed: float, home: str, microbatches: int, most: float, tmp_path: Path
) -> None:
    place = tmp_path if home == "files" else "cpu"
    model = OffloadModel(blocks(), "cpu", place, BLOCKS, True, microbatches)
    x = torch.randn(4, 16)
    assert calls_of(lambda: model(x).mean().backward()) / microbatches <= most * checkpointed


@pytest.mark.parametrize(
    ("kind", "named"), [(blocks, None), (lambda: OwnForward([*blocks()]), "layers")], ids=["sequential", "own-forward"]
)
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
