"""Blocks that use parameters or tensors of the model which are none of their arguments."""

from __future__ import annotations

import copy
from pathlib import Path
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
def test_its_gradient_may_be_requested_and_hooked(way: str) -> None:
    bare = Model(way)
    model, found, seen = wrap(bare), [], []
    for each in (bare, model):
        asked = [each.other.weight, each.layer[1].linear.weight]
        found.append(torch.autograd.grad(each(batch()).sum(), asked))
        handle = each.other.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        each(batch()).sum().backward()
        handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(*seen)
    assert_equal(bare, model)


def test_a_tensor_with_a_graph_may_enter_by_an_attribute() -> None:
    bare, model = Model("attribute"), wrap(Model("attribute"))
    for trained in (True, False):
        for each in (bare, model):
            each.requires_grad_(trained)
            each.layer[2].requires_grad_(True)
            each(batch()).sum().backward()
        assert_equal(bare, model)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_a_parameter_of_another_block_gets_the_gradients_of_both(home: str, tmp_path: Path) -> None:
    bare = Model("none")
    model = OffloadModel(
        copy.deepcopy(bare), "cpu", tmp_path if home == "disk" else "cpu", blocks="layer", checkpoint_activation=True
    )
    for each in (bare, model):
        each.layer[2].held[0] = each.layer[1].linear
    for _ in range(2):
        for each in (bare, model):
            each(batch()).square().sum().backward()
        assert_equal(bare, model, exact=False)


def test_a_parameter_that_a_block_holds_is_cast_with_the_others() -> None:
    bare = Model("held")
    plain = copy.deepcopy(bare).bfloat16()
    model = wrap(bare, param_dtype=torch.bfloat16, checkpoint_activation=False)
    outputs = [plain(batch().bfloat16()), model(batch())]
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 0.05 * p.grad.abs().max()


@pytest.mark.parametrize("recompute", [True, False])
def test_an_error_about_a_parameter_of_another_block_in_its_own_type_names_param_dtype(recompute: bool) -> None:
    model = wrap(Model("none"), param_dtype=torch.bfloat16, checkpoint_activation=recompute)
    model.layer[2].held[0] = model.layer[1].linear
    with pytest.raises(RuntimeError, match="param_dtype= its parameters are bfloat16"):
        model(batch())
    model.layer[2].held[0] = None
    model(batch()).float().sum().backward()
