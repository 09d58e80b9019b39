"""Weights that are written through ``.data`` between a forward and its backward: the backward is refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import assert_equal

WIDTH = 8


def layers(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def batch(seed: int = 1) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def recompute(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


def offloaded(bare: nn.Sequential, home: str, recompute: bool, **more: Any) -> OffloadModel:
    return OffloadModel(copy.deepcopy(bare), "cpu", home, len(bare), recompute, **more)


def step(run: nn.Module, seed: int = 1) -> list[Tensor]:
    run.zero_grad()
    run(batch(seed)).pow(2).sum().backward()
    return [p.grad.clone() for p in run.parameters() if p.grad is not None]


def test_data_of_another_type_is_refused_until_it_is_of_the_old_one(home: str, recompute: bool) -> None:
    bare = layers()
    model = offloaded(bare, home, recompute)
    weight = next(model.parameters())
    weight.data = weight.data.double() * 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected data of torch\.float32 for parameter 0\.weight"):
            model(batch())
    weight.data = weight.data.float()
    next(bare.parameters()).data.mul_(2)
    assert all(map(torch.equal, step(model), step(bare)))


@dataclasses.dataclass
class Batch:
    x: Tensor


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: Batch) -> Tensor:
        return self.linear(batch.x)


def test_an_object_that_is_the_input_holds_in_the_recomputation_what_it_held(recompute: bool) -> None:
    bare = nn.Sequential(Opens(), nn.Linear(8, 8))
    model = OffloadModel(copy.deepcopy(bare), "cpu", checkpoint_activation=recompute)
    for each in (model, bare):
        given = Batch(torch.ones(4, 8))
        loss = each(given).sum()
        given.x = later = torch.zeros(4, 8)
        loss.backward()
        assert given.x is later
    assert_equal(model, bare)


def test_a_tensor_of_an_object_that_is_written_before_the_backward_is_refused(recompute: bool) -> None:
    model = OffloadModel([Opens(), nn.Linear(8, 8)], "cpu", checkpoint_activation=recompute)
    given = Batch(torch.ones(4, 8))
    loss = model(given).sum()
    given.x.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    model(given).sum().backward()
