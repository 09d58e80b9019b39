"""What autograd promises of any module holds for an OffloadModel, or is refused before anything happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer

WIDTH = 8


def mlp(depth: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


@pytest.mark.parametrize("recompute", [False, True])
def test_of_the_shards_before_all_that_was_asked_for_one_at_most_is_loaded(home: str, recompute: bool) -> None:
    model = OffloadModel(mlp(8), "cpu", home, 8, recompute)
    loss = model(torch.randn(6, WIDTH)).sum()
    before = model.statistics().shard_loads
    torch.autograd.grad(loss, list(model.parameters())[-5])  # of shard 5; the last two are still in slots
    assert model.statistics().shard_loads - before <= 2  # one ahead of its use


def test_hooks_beside_updates_in_backward_are_refused_before_a_shard_is_updated(home: str) -> None:
    model = OffloadModel(mlp(4), "cpu", home, 4, True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient * 2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="hooks"):
        model(torch.randn(6, WIDTH)).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    handle.remove()
    model(torch.randn(6, WIDTH)).sum().backward()
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))
