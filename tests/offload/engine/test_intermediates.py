"""A loss on what did not leave the model as an output has the gradients of the bare model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import assert_equal

WIDTH = 6


# --- containers that nothing knows ------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    name: str = "state"


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = [hidden]


class Into(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.linear(x))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any) -> Tensor:
        hidden = state.hidden
        return self.linear(hidden[0] if isinstance(hidden, list) else hidden)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", [State, Holder])
@pytest.mark.parametrize("slices", [4, 2])
def test_an_object_that_holds_tensors_passes_between_shards_and_within(kind: Any, recompute: bool, slices: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Into(kind), OutOf(), Into(kind), OutOf())
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=slices, checkpoint_activation=recompute)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        for run in (bare, model):
            run(x).sum().backward()
    assert_equal(bare, model)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_an_input_that_hides_a_tensor_with_a_gradient_is_that_of_the_bare_model(recompute: bool, frozen: bool) -> None:
    bare = nn.Sequential(OutOf().requires_grad_(not frozen), nn.Linear(WIDTH, WIDTH))
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=recompute)
    leaf = torch.randn(4, WIDTH, requires_grad=True)
    found = []
    for run in (bare, model):
        run(State(leaf * 2)).square().sum().backward()
        found.append(leaf.grad)
        leaf.grad = None
    assert found[0] is not None
    assert torch.equal(found[0], found[1])
    assert_equal(bare, model)
