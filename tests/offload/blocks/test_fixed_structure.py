"""What a model with blocks refuses: methods that replace parameters, and forwards in the shape of a U-Net."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.offload.blocks.towers import WIDTH, Block, assert_equal, make, words


class Resizable(nn.Module):
    """Has the methods of transformers that replace parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make(3)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.words

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.inner.words = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None) -> Any:
        if new_num_tokens not in (None, len(self.inner.words.weight)):
            self.inner.words = nn.Embedding(new_num_tokens, WIDTH)
        return self.inner.words

    def merge_and_unload(self) -> nn.Module:
        self.inner.norm = nn.Identity()
        return self

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.inner(ids)["states"]
        return states


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("resize_token_embeddings", {"new_num_tokens": 40}),
        ("resize_token_embeddings", {"pad_to_multiple_of": 8}),
        ("set_input_embeddings", {"value": nn.Embedding(40, WIDTH)}),
        ("merge_and_unload", {}),
    ],
)
def test_a_method_that_replaces_parameters_is_refused_before_it_replaces_any(
    method: str, arguments: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    bare = Resizable()
    model: Any = OffloadModel(copy.deepcopy(bare), "cpu", checkpoint_activation=True, blocks="inner.encoder.layer")
    with pytest.raises(RuntimeError, match=f"Resizable.{method}.. would replace .* (before it is|afterwards)"):
        getattr(model, method)(**arguments)
    for each in (bare, model):
        torch.manual_seed(0)
        each(words()).sum().backward()
    assert_equal(bare, model)


def test_a_call_that_replaces_nothing_runs() -> None:
    model: Any = OffloadModel(Resizable(), "cpu", checkpoint_activation=True, blocks="inner.encoder.layer")
    table = model.get_input_embeddings()
    assert model.resize_token_embeddings() is table
    assert model.resize_token_embeddings(len(table.weight)) is table
    model.set_input_embeddings(table)


class UNet(nn.Module):
    """Runs down its blocks, then up its others, each with what the block on the same level has returned."""

    def __init__(self, *, upwards: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block(0.1) for _ in range(3))
        self.up = nn.ModuleList(Block(0.1) for _ in range(3))
        self.upwards = upwards

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)[0]
            skipped.append(x)
        for block in reversed(self.up) if self.upwards else self.up:
            x = block(x, bias=skipped.pop())[0]
        return x


@pytest.mark.parametrize("slices", [None, 2, 4])
@pytest.mark.parametrize("upwards", [False, True])
def test_a_unet_trains(slices: int | None, upwards: bool) -> None:
    torch.manual_seed(0)
    bare, x = UNet(upwards=upwards), torch.randn(2, WIDTH)
    model = OffloadModel(
        copy.deepcopy(bare), "cpu", num_slices=slices, checkpoint_activation=True, blocks=("down", "up")
    )
    for each in (bare, model):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    assert_equal(bare, model, exact=False)  # what is skipped has two gradients


class Level(nn.Module):
    """A level of a U-Net that contains the levels below it."""

    def __init__(self, below: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.below: Any = Level(below - 1) if below else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.cat([x, self.below(torch.relu(self.before(x)))], -1))
        return y


def test_a_unet_of_nested_levels_is_refused() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList([Level(2)])
            self.levels.append(self.levels[0].below)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.levels[0](x)
            return y

    with pytest.raises(ValueError, match=r"block levels.1 is inside block levels.0; name lists that are apart"):
        OffloadModel(Nested(), "cpu", checkpoint_activation=True, blocks="levels")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_blocks_are_refused_before_anything_changes() -> None:
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    blocks[1] = torch.jit.script(blocks[1])
    model = nn.Module()
    model.layers = blocks
    weight = blocks[0].weight
    with pytest.raises(ValueError, match=r"block layers\.1 is scripted"):
        OffloadModel(model, "cpu", "cpu", blocks="layers", checkpoint_activation=True)
    assert model.layers[0].weight is weight
