"""Blocks that use parameters or tensors of the model which are none of their arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import WIDTH, assert_equal


class Leaning(nn.Module):
    """Uses the layer that it gets as an argument, or holds where no module is registered."""

    def __init__(self, held: nn.Module | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.held = [held]
        self.bias: Tensor | None = None

    def forward(self, x: Tensor, other: nn.Module | None = None) -> Tensor:
        y = self.linear(x)
        for layer in (other, *self.held):
            y = y if layer is None else y + layer(x)
        return x + torch.tanh(y if self.bias is None else y + self.bias)


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layer = nn.ModuleList(Leaning(self.other if way == "held" else None) for _ in range(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.prefix(x)
        for block in self.layer:
            x = block(x, self.other if self.way == "argument" else None)
            if self.way == "attribute":
                self.layer[2].bias = self.other(x)
        return x


def wrap(bare: nn.Module, **choices: Any) -> Any:
    return OffloadModel(copy.deepcopy(bare), "cpu", blocks="layer", **{"checkpoint_activation": True, **choices})


def batch() -> Tensor:
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@pytest.mark.parametrize("way", ["argument", "held"])
@pytest.mark.parametrize("trained", [("prefix", "layer", "other"), ("other",), ("layer.2", "other")])
def test_a_parameter_that_blocks_use_by_no_argument_is_trained(way: str, trained: tuple[str, ...]) -> None:
    bare = Model(way)
    bare.requires_grad_(False)
    for name in trained:
        bare.get_submodule(name).requires_grad_(True)
    models = [wrap(bare), wrap(bare, num_slices=2, num_microbatches=2)]
    for _ in range(2):
        for each in (bare, *models):
            each(batch()).square().mean().backward()
        for model in models:
            assert_equal(bare, model, exact=False)


@pytest.mark.parametrize("way", ["argument", "held"])
def test_its_gradient_cannot_be_requested_or_hooked(way: str) -> None:
    model, bare = wrap(Model(way)), Model(way)
    asked = ["other.weight"]
    with pytest.raises(RuntimeError, match=r"its gradient was requested .* block layer.0 uses it though it is none of"):
        torch.autograd.grad(model(batch()).sum(), [model.get_parameter(name) for name in asked])
    found = [torch.autograd.grad(each(batch()).sum(), each.layer[1].linear.weight)[0] for each in (bare, model)]
    assert torch.equal(*found)
    handle = model.other.weight.register_hook(lambda gradient: None)
    loss = model(batch()).sum()
    with pytest.raises(RuntimeError, match=r"has hooks or its gradient"):
        loss.backward()
    handle.remove()
    assert all(p.grad is None for p in model.parameters())


def test_a_tensor_with_a_graph_that_enters_by_an_attribute_is_refused() -> None:
    bare, model = Model("attribute"), wrap(Model("attribute"))
    with pytest.raises(RuntimeError, match=r"block 2 .* uses a tensor with a graph, .* none of its arguments"):
        model(batch())
    for each in (bare, model):
        each.requires_grad_(False)
        each.layer[2].requires_grad_(True)
        each(batch()).sum().backward()  # without a graph it may
    assert_equal(bare, model)


def test_a_parameter_of_another_block_and_one_that_is_cast_are_refused() -> None:
    model = wrap(Model("none"))
    model.layer[2].held[0] = model.layer[1].linear
    with pytest.raises(RuntimeError, match=r"block 2 .* uses parameter layer.1.linear.\w+ of another block"):
        model(batch())
    with pytest.raises(RuntimeError, match=r"block 0 .* uses a parameter of the shape \(8,?.*\), which is not its own"):
        wrap(Model("held"), param_dtype=torch.bfloat16)(batch())
