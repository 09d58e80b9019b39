"""Outputs of a streamed model in a container that forgets members that are None, as those of transformers do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradcache import GradCache
from offload import MemoryPolicy, OffloadModel

WIDTH = 6


@dataclass
class Output:
    states: Tensor | None = None
    pooled: Tensor | None = None


def flatten(output: Output) -> tuple[list[Any], Any]:
    present = {name: value for name, value in vars(output).items() if value is not None}
    return list(present.values()), list(present)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    pytree.register_pytree_node(Output, flatten, lambda leaves, names: Output(**dict(zip(names, leaves, strict=True))))
    yield
    pytree._deregister_pytree_node(Output)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Output:
        return Output(x * 2, self.pooler(x))


class Around(nn.Module):
    """Uses one member of the output alone, so that the other gets no gradient."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x).states


def towers() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Head())
    return Around(layers), copy.deepcopy(layers)


def loss_of(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x @ y.T, torch.arange(len(x)))


@pytest.mark.parametrize("activation_bytes", [None, "1MiB"])
def test_a_member_without_a_gradient_is_not_taken_for_one_that_is_absent(activation_bytes: str | None) -> None:
    plain, layers = towers()
    memory = MemoryPolicy.fixed(activation_bytes=activation_bytes, join_chunks=True) if activation_bytes else None
    ours = Around(OffloadModel(layers, "cpu", num_slices=2, checkpoint_activation=True, memory=memory))
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    loss_of(plain(x), plain(y)).backward()
    for _ in range(2):  # chunks run together once their memory is known
        ours.zero_grad()
        GradCache([ours, ours], 2, loss_of)(x, y)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6)
    assert ours.tower[-1].pooler.weight.grad is None
