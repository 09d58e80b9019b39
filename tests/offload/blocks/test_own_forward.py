"""Models whose blocks are called by their own forward: which blocks, in how many loads, and what is refused."""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from offload import OffloadModel
from pipe import Pipe
from tests.offload.blocks.towers import WIDTH, WORDS, Block, make, step, words, wrap
from tests.offload.side_by_side import assert_equal, close

BLOCKS = "encoder.layer"


def assert_close_gradients(plain: nn.Module, ours: nn.Module) -> None:
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or close(p.grad, q.grad)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_block_alone_with_gradients_is_equal_to_the_plain_one() -> None:
    bare = make()
    model = wrap(bare)
    for each in (bare, model):
        torch.manual_seed(0)
        each.encoder.layer[0](torch.ones(1, 2, WIDTH))[0].square().sum().backward()
    step(bare), step(model)
    assert_equal(bare, model)


def test_a_tensor_that_enters_every_block_is_stored_once() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(Block(0.0) for _ in range(6))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = None
            for block in self.layer:
                x, bias = block(x, mask, bias=bias)
            return x

    model = wrap(Wide(), blocks="layer")
    x, mask = torch.randn(2, 50, 3, WIDTH)
    model(x, mask).sum().backward()  # the first forward of layers runs on copies of their inputs
    output = model(x, mask)
    assert model._homes.meter.held_bytes < 7.5 * x.nbytes  # each input, the mask, and the bias, which is narrower
    output.sum().backward()


class Around(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.out = tower, nn.Linear(WORDS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tower(x)["logits"].mean(1))


def test_it_is_a_stage_of_a_pipe() -> None:
    bare = make(dropout=0.0)
    model = wrap(bare)
    pipe = Pipe(nn.Sequential(Around(model), nn.Linear(WIDTH, 2)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    plain = copy.deepcopy(nn.Sequential(pipe[0], pipe[1]))
    plain[0].tower = bare
    for each in (plain, pipe):
        each(words(4)).square().sum().backward()
    assert_close_gradients(bare, model)


# --- slices -----------------------------------------------------------------------------------------------------------


def test_each_shard_is_loaded_once_per_pass_with_all_of_its_blocks(tmp_path: Path) -> None:
    model = wrap(make(9), tmp_path, num_slices=3, num_microbatches=2)
    step(model)
    before = model.statistics()
    step(model)
    after = model.statistics()
    assert after.shard_loads - before.shard_loads == 2 * 3 - 2  # two slots keep their shards between the passes
    stored = sum(p.nbytes for p in model.encoder.parameters())
    assert after.bytes_loaded - before.bytes_loaded == stored + stored // 3
    copied = copy.deepcopy(model)
    assert [len(shard.layers) for shard in copied._homes.shards] == [3, 3, 3]


class Changing(nn.Module):
    """Changes in place what a block has got, before the next block runs."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.changes = nn.ModuleList(Block(0.0) for _ in range(4)), changes

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x)
        for k, block in enumerate(self.layer):
            if k == 2:
                mask = mask.mul_(0.5) if self.changes else mask * 0.5
            x = block(x, mask)[0]
        return x


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_a_change_of_what_entered_a_block_changes_no_gradient_and_is_refused_when_inputs_are_not_copied(
    slices: int,
) -> None:
    bare, model = Changing(changes=False), wrap(Changing(changes=True), num_slices=slices, blocks="layer")
    x = torch.randn(2, WIDTH)
    bare(x).sum().backward(), model(x).sum().backward()
    assert_equal(bare, model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()


# --- a forward of the instance ----------------------------------------------------------------------------------------


def in_16_bits(model: Any) -> Any:
    """Replaces the forward of an instance as accelerate's mixed precision does."""
    around = torch.autocast("cpu", torch.bfloat16)
    model._original_forward = model.forward
    model.forward = types.MethodType(around(model.forward.__func__), model)
    return model


def twice_as_wide(model: Any) -> Any:
    forward = type(model).forward

    @functools.wraps(forward)
    def replaced(*args: Any, **inputs: Any) -> Any:
        output = forward(model, *args, **inputs)
        return {**output, "states": output["states"] * 2}

    model.forward = replaced
    return model


def test_a_block_keeps_a_forward_of_its_own_also_in_copies_of_the_model_and_of_a_part() -> None:
    bare = make()
    block = bare.encoder.layer[1]
    block.forward = types.MethodType(lambda self, x, *args, **more: (x * self.norm.weight, more["bias"]), block)
    bare = copy.deepcopy(bare)
    model = wrap(bare)
    with torch.no_grad():
        model.encoder.layer[1].norm.weight.mul_(2)
        copied, part = copy.deepcopy(model), copy.deepcopy(model.encoder)
        model.encoder.layer[1].norm.weight.div_(2)
        bare.encoder.layer[1].norm.weight.mul_(2)
    step(bare), step(copied)
    assert_equal(bare, copied)
    x = torch.randn(1, 2, WIDTH)
    assert torch.equal(part.layer[1](x, bias=None)[0], x * 2)


@pytest.mark.parametrize("replace", [in_16_bits, twice_as_wide])
def test_a_forward_that_is_set_on_the_wrapper_or_was_set_before_calls_the_blocks(replace: Any) -> None:
    bare = make()
    if replace is in_16_bits:
        model = replace(wrap(bare))
    else:
        model = OffloadModel(replace(copy.deepcopy(bare)), "cpu", checkpoint_activation=True, blocks=BLOCKS)
    step(replace(bare)), step(model)
    assert_equal(bare, model)
    assert model.statistics().shard_loads == 2 * 4 - 2


# --- which blocks -----------------------------------------------------------------------------------------------------


def test_blocks_are_named_by_class_or_names_or_found_with_a_warning() -> None:
    for blocks in (Block, [BLOCKS], BLOCKS):
        assert len(wrap(make(), blocks=blocks)._homes.shards) == 4
    with pytest.warns(UserWarning, match=r"Model\.encoder\.layer \(4 modules\)") as caught:
        model = wrap(make(), blocks=None)
    assert sum(each.category is UserWarning for each in caught) == 1  # beside that of a home in memory
    assert len(model._homes.shards) == 4


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
    model = wrap(Resizable(), blocks="inner.encoder.layer")
    norm, table = model.inner.norm, model.inner.words
    with pytest.raises(RuntimeError, match=f"Resizable.{method}.. would replace .* (before it is|afterwards)"):
        getattr(model, method)(**arguments)
    assert (model.inner.norm, model.inner.words) == (norm, table)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(len(table.weight)) is table
    model.set_input_embeddings(table)  # replaces nothing
