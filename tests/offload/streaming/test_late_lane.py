"""No copy is read, or overwritten, before its wait: with late lanes a forgotten wait gives NaN, every time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from offload import MemoryPolicy, OffloadModel
from tests.offload.late import run_late
from tests.offload.zoo import WIDTH, build, reference


def train(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """Losses, and the final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = run(x).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        if step != 1:  # so that gradients accumulate at home once
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def both(
    home: str, *, tied: bool = True, microbatches: int = 2, recompute: bool = True, slots: int = 2, slices: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the bare model and an offloaded one train to."""
    bare = build(["linear", "dropout", "linear", "inplace", "linear"], tied=tied)
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        home,
        num_slices=slices,
        checkpoint_activation=recompute,
        num_microbatches=microbatches,
        memory=MemoryPolicy.fixed(slots=slots, boundary_bytes=100),
    )
    cuts = [len(shard.layers) for shard in model._homes.shards]
    return train(bare, lambda x: reference(bare, cuts, x, microbatches)), train(model, model)


def equal(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*pair, strict=True))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    recompute=st.booleans(),
    microbatches=st.integers(1, 3),
    slots=st.integers(2, 5),
    slices=st.integers(2, 8),
)
def test_training_is_exact_in_whatever_order_copies_finish(
    tmp_path: Path, seed: int, recompute: bool, microbatches: int, slots: int, slices: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_late(patch, seed)
        assert equal(both(f"{tmp_path}/", microbatches=microbatches, recompute=recompute, slots=slots, slices=slices))
