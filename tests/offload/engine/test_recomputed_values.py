"""A recomputation ends when all that backward needs is there, and leaves out nothing before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
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


class Stash(torch.autograd.Function):
    """Keeps a tensor for its backward as an attribute, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.product = torch.mm(x, weight)
        return ctx.product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.product, None


class Stashing(Block):
    """No tensor is saved in its custom function: a product in there looks dead."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return Stash.apply(super().forward(x), self.square)


class Elsewhere(Block):
    """Saves what its products need under hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)  # saves its result, here where it is seen
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return self.down(self.up(x))


class Inner(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.up, x, use_reentrant=False))


class Looking(Block):
    """Decides by a value of its last result what it does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > -1e9 else y


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        y += x
        return y


class Dropping(Block):
    """As a transformer's in training: the mask, which is saved, is drawn after the product."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.5)


class OwnMask(Block):
    """Draws its mask itself, from numbers and not from its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y * ((torch.rand(len(x)) > 0.5).to(x.dtype) / 0.5)[:, None]


class FromNumPy(Block):
    """What is saved, and all that the result depends on, goes through memory that no operation is seen to read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x * torch.from_numpy(np.tanh(y.detach().numpy()))


class FromNumbers(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x * torch.tensor(y.tolist())


class Deciding(Block):
    """Decides by a value that no operation is seen to read."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y if np.tanh(y.detach().numpy()).sum() > -1e9 else torch.sigmoid(y)


class NativeDropout(Block):
    """As on an accelerator: one operation for mask and result."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.native_dropout(self.down(F.gelu(self.up(x))), 0.5, True)[0]


class Peeking(torch.autograd.Function):
    """Reads two tensors, one of them unseen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.result = torch.stack([row * max(numbers) for row, numbers in zip(x, y.tolist(), strict=True)])
        return ctx.result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.result, None


class Unseen(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return Peeking.apply(x + 1, y)


class AddedInPlace(Block):
    """Saves a result of a tensor to which the product was added in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        y.add_(self.down(F.gelu(self.up(x))))
        return torch.sigmoid(y)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(1, 2, 3), nn.Conv1d(2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x[:, None])))[:, 0]


KINDS = [
    *(Block, Stashing, Elsewhere, Inner, Looking, InPlace, Dropping, OwnMask),
    *(NativeDropout, FromNumPy, FromNumbers, Deciding, Unseen, AddedInPlace, Convolution),
]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_those_of_the_bare_model(kind: Callable[[], nn.Module], microbatches: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(kind(), nn.Tanh(), kind())
    x = torch.randn(4, WIDTH if kind is not Convolution else 12)
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    model._offloaded.calls.micro_batches.given = microbatches
    for seed in range(2):
        results = []
        for each in (
            (bare, model) if microbatches == 1 or kind not in (Dropping, NativeDropout, OwnMask) else (model, model)
        ):
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


def test_a_sum_that_no_gradient_needs_has_its_values_after_backward() -> None:
    class Summing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.total: Tensor = torch.zeros(4, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.total = torch.full_like(x, 1.0).detach()
            with torch.no_grad():
                self.total.add_(1)
            self.total = self.total.clone().add_(self.down(F.gelu(self.up(x))))
            return x * 2

    bare = nn.Sequential(Summing(), nn.Linear(WIDTH, WIDTH))
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    x = torch.randn(4, WIDTH)
    for expected, actual in zip(run(bare, x), run(model, x), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(next(model.children()).total, bare[0].total)
