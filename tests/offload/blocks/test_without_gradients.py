"""Forwards that call some blocks without gradients, and blocks that write into lists and dicts of their arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import assert_equal

WIDTH = 4


def linear() -> nn.Linear:
    """Of float64: sums of gradients in another order are still close to equal."""
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Block(nn.Module):
    """A residual block that may leave notes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, notes: Any = None) -> Tensor:
        y = x + nn.functional.dropout(torch.tanh(self.linear(x)), 0.1, self.training)
        if isinstance(notes, list):
            notes.append(y)
        if isinstance(notes, dict):
            notes["calls"] = notes.get("calls", 0) + 1
        return y


class Model(nn.Module):
    def __init__(self, without: tuple[int, ...] = (), mode: Callable[[], Any] = torch.no_grad) -> None:
        super().__init__()
        self.prefix, self.suffix = linear(), linear()
        self.layer = nn.ModuleList(Block() for _ in range(4))
        self.without, self.mode = without, mode

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.prefix(x)
        for k, block in enumerate(self.layer):
            if k in self.without:
                with self.mode():
                    y = block(x)
                x = x * y.clone()  # that of the inference mode must not be saved
            else:
                x = block(x)
        y = self.suffix(x)
        return y if extra is None else y * extra


WITHOUT = [(0,), (0, 1), (1,), (2, 3), (0, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("without", WITHOUT)
def test_chunks_call_blocks_without_gradients_as_the_plain_model(without: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    bare = Model(without).eval()
    for slices in (4, 2):
        model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", slices, True, num_microbatches=3, blocks="layer").eval()
        x = torch.randn(7, WIDTH, dtype=torch.float64)
        bare.zero_grad()
        for each in (bare, model):
            each(x).square().sum().backward()
        assert_equal(bare, model, exact=False)


def test_no_shard_is_loaded_in_the_backward_of_a_frozen_part() -> None:
    model: Any = OffloadModel(Model((0, 1, 2, 3)), "cpu", "cpu", 4, True, blocks="layer")
    loss = model(torch.randn(3, WIDTH, dtype=torch.float64)).sum()
    before = model.statistics().shard_loads
    loss.backward()
    assert model.statistics().shard_loads == before
    assert model.suffix.weight.grad is not None
    assert all(p.grad is None for p in model.layer.parameters())


def test_an_input_that_only_code_after_frozen_blocks_uses_gets_its_gradient() -> None:
    torch.manual_seed(0)
    bare = Model().eval()
    bare.requires_grad_(False)
    bare.layer[3].requires_grad_(True)
    found = []
    for each in (bare, OffloadModel(copy.deepcopy(bare), "cpu", "cpu", 2, True, blocks="layer")):
        extra = torch.full((3, WIDTH), 2.0, dtype=torch.float64, requires_grad=True)
        each(torch.ones(3, WIDTH, dtype=torch.float64), extra).sum().backward()
        found.append(extra.grad)
    assert found[0] is not None
    assert torch.equal(*found)


class LateEnabling(Model):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        x = self.layer[0](x)
        with torch.enable_grad():
            for block in self.layer[1:]:
                x = block(x)
            return x


def test_gradients_may_be_enabled_between_blocks() -> None:
    bare = LateEnabling().eval()
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", 4, True, blocks="layer")
    for each in (bare, model):
        with torch.no_grad():
            output = each(torch.ones(3, WIDTH, dtype=torch.float64))
        output.square().sum().backward()
    assert_equal(bare, model)


class Noting(Model):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        notes = self.kind()
        for block in self.layer:
            x = block(x, notes)
        return x + sum(notes) if isinstance(notes, list) else x * notes["calls"]


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("slices", [4, 1])
@pytest.mark.parametrize("frozen", [0, 3])
def test_code_sees_what_a_block_writes_into_a_list_or_dict(kind: type, slices: int, frozen: int) -> None:
    torch.manual_seed(0)
    bare, x = Noting(kind).eval(), torch.ones(3, WIDTH, dtype=torch.float64)
    bare.layer[:frozen].requires_grad_(False)
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", slices, True, blocks="layer")
    with torch.no_grad():
        assert torch.equal(bare(x), model(x))
    for _ in range(3):
        for each in (bare, model):
            each(x).square().sum().backward()
        assert_equal(bare, model)


class InPlace(Block):
    def forward(self, x: Tensor, notes: Any = None) -> Tensor:
        return super().forward(x.mul_(0.5))


class AfterInPlace(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(InPlace() for _ in range(4))

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        for block in self.layer:
            x = block(x) + x
        return x


@pytest.mark.parametrize("slices", [4, 1])
def test_code_sees_what_a_block_writes_into_its_input(slices: int) -> None:
    torch.manual_seed(0)
    bare = AfterInPlace().eval()
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", slices, True, blocks="layer")
    with torch.no_grad():
        for _ in range(3):
            x = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)
            assert torch.equal(bare(x.clone()), model(x.clone()))
    for recompute in (True, False):
        for frozen in (0, 3):
            bare.layer[:frozen].requires_grad_(False)
            bare.zero_grad()
            model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", slices, recompute, blocks="layer")
            for _ in range(3):
                for each in (bare, model):
                    each(x.clone()).square().sum().backward()
                assert_equal(bare, model)
