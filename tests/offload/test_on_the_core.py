"""Models on the engine that autograd drives give the bits of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.engine.visit import _is_held_once

WIDTH = 6


class Twice(nn.Module):
    """Calls its blocks in reverse order, the first one twice and the last one not at all; keeps what is in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.middle: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for k in (2, 1, 0, 0):
            x = x + self.blocks[k](x)
            if k == 1:
                self.middle = x
        return x


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(WIDTH)) for _ in range(4))
    )


@pytest.mark.parametrize("recompute", [True, False])
def test_layers_with_masks_and_statistics_train_as_the_plain_ones(recompute: bool, home: str) -> None:
    bare = layers()
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=recompute)
    assert model._engine is not None
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(5, WIDTH)
    for _ in range(3):
        found = []
        for each, optimizer in ((bare, plain), (model, ours)):
            torch.manual_seed(1)
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        assert torch.equal(*found)
    ours.synchronize()
    expected, state = bare.state_dict(), model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_in_any_order_and_a_loss_in_the_middle(recompute: bool, home: str) -> None:
    torch.manual_seed(0)
    bare = Twice()
    model: Any = OffloadModel(copy.deepcopy(bare), "cpu", home, blocks="blocks", checkpoint_activation=recompute)
    x = torch.randn(5, WIDTH)
    for each in (bare, model):
        output = each(x)
        (output.square().mean() + each.middle.sum()).backward()
    for ours, plain in zip(model.parameters(), bare.parameters(), strict=True):
        assert (ours.grad is None) == (plain.grad is None)
        assert plain.grad is None or torch.equal(ours.grad, plain.grad)


def test_a_pass_loads_each_shard_once_whatever_the_number_of_micro_batches(home: str) -> None:
    bare = layers().eval()
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=4, checkpoint_activation=True, num_microbatches=4)
    x = torch.randn(8, WIDTH)
    model(x).sum().backward()
    before = model.statistics().shard_loads
    model(x).sum().backward()
    assert model.statistics().shard_loads - before <= 2 * 4


@pytest.mark.filterwarnings("ignore:a view of the weights")  # the graph of the first derivative holds it
def test_a_second_derivative_is_that_of_the_plain_model() -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", checkpoint_activation=True)
    x = torch.randn(5, WIDTH, requires_grad=True)
    found = []
    for each in (bare, model):
        (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([p.grad for p in each.parameters()])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_gradient_is_added_to_in_place_only_where_one_variable_holds_it() -> None:
    def held_once(make: Callable[[], Tensor], keep: Callable[[Tensor], Any] = lambda gradient: None) -> bool:
        gradient = make()
        kept = keep(gradient)
        found = _is_held_once(gradient)
        del kept
        return found

    def product() -> Tensor:
        return torch.ones(2, 3).t()

    assert held_once(lambda: torch.ones(3))
    assert held_once(product)
    for make in (lambda: torch.ones(3), product):
        assert not held_once(make, lambda gradient: gradient)
        assert not held_once(make, lambda gradient: gradient[:1])
    assert not held_once(product, lambda gradient: gradient._base)
    assert not held_once(lambda: torch.ones(1).expand(3))
    assert not held_once(lambda: torch.ones(3).to_sparse())
