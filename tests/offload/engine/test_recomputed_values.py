"""A recomputation ends when all that backward needs is there, and leaves out nothing before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from offload import OffloadModel

WIDTH = 8


class Block(nn.Module):
    """As a transformer's: it ends in a linear layer and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Inner(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.up, x, use_reentrant=False))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        y += x
        return y


class Dropping(Block):
    """As a transformer's in training: the mask, which is saved, is drawn after the product."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.5)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 2, 3), nn.Conv1d(2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x[:, None])))[:, 0]


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    model(x).pow(2).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def products(model: nn.Module, x: Tensor) -> int:
    """Number of products of matrices in a forward and backward."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        run(model, x)
    return counting.count


@pytest.mark.parametrize("kind", [Block, Inner, InPlace, Dropping, Convolution])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_of_the_bare_model(kind: Callable[[], nn.Module], microbatches: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(kind(), nn.Tanh(), kind())
    x = torch.randn(4, WIDTH if kind is not Convolution else 12)
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    model._offloaded.calls.micro_batches.given = microbatches
    for seed in range(2):
        results = []
        for each in (bare, model) if microbatches == 1 or kind is not Dropping else (model, model):
            torch.manual_seed(seed)
            each.zero_grad()
            results.append(run(each, x))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", [Block, InPlace])
def test_the_last_product_of_a_block_is_not_recomputed(kind: Callable[[], nn.Module]) -> None:
    bare = nn.Sequential(kind(), kind())
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    x = torch.randn(4, WIDTH)
    # Each block multiplies twice forward, of which one is recomputed.
    # A layer that may write over its input works on a copy of it; whether it does shows when it runs first.
    for _ in range(2):
        assert products(model, x) == products(bare, x) + 2
