"""Modules around blocks that stream as shards of their own: named by hand, or since memory is too small for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.units import shown_bytes
from tests.offload.blocks import towers
from tests.offload.blocks.towers import WIDTH, Large, make, step, words
from tests.offload.side_by_side import advance, assert_equal, train

ALL = ["words", "encoder.layer", "head"]


def test_a_checkpoint_moves_between_models_whose_embedding_streams_and_stays(tmp_path: Path) -> None:
    models = [towers.wrap(make(3), tmp_path / str(k), blocks=blocks) for k, blocks in enumerate((ALL, "encoder.layer"))]
    optimizers = [OffloadOptimizer(model, torch.optim.AdamW, lr=0.01) for model in models]
    for first, second in ((0, 1), (1, 0)):
        step(models[first])
        advance(optimizers[first])
        save_checkpoint(tmp_path / str(first) / "saved", models[first], optimizers[first])
        load_checkpoint(tmp_path / str(first) / "saved", models[second], optimizers[second])
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, first)
            advance(optimizer)
        assert_equal(*models)


# --- by memory --------------------------------------------------------------------------------------------------------


def limited(bare: nn.Module, home: Any, memory: int | str, **choices: Any) -> Any:
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **{"memory": memory, "blocks": "layers", **choices})


BLOCKS = [f"layers.{k}" for k in range(4)]
#: Of the embedding.
BYTES = 8000 * 4 * WIDTH * 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_limit_below_what_stays_makes_shards_of_the_largest_modules(tied: bool, tmp_path: Path) -> None:
    bare = Large(tied=tied)
    model = limited(bare, tmp_path, 3 * BYTES + (1 << 20))
    assert model._homes.blocks == ["words", *BLOCKS, "head"]
    ours, theirs = OffloadOptimizer(model, torch.optim.AdamW), torch.optim.AdamW(bare.parameters(), fused=True)
    for seed in range(5):
        assert train(model, ours, [words(seed=seed)]) == train(bare, theirs, [words(seed=seed)])
        ours.synchronize()
        assert_equal(bare, model)
    other = copy.deepcopy(model)
    assert other._homes.blocks == model._homes.blocks


@pytest.mark.parametrize(
    ("bare", "memory", "choices", "blocks"),
    [
        ({}, "1GiB", {}, BLOCKS),
        ({}, None, {}, BLOCKS),
        ({}, 3 * BYTES, {"resident": "words.*"}, BLOCKS),
        ({}, 3 * BYTES, {"num_slices": 4}, BLOCKS),
        ({"tied": False, "rows": 2000}, 4 * BYTES, {}, ["words", *BLOCKS]),
    ],
)
def test_they_stay_where_they_fit_or_are_to_stay(bare: Any, memory: Any, choices: Any, blocks: Any) -> None:
    assert limited(Large(**bare), "cpu", memory, **choices)._homes.blocks == blocks


def test_what_cannot_be_a_shard_stays_and_the_error_counts_it(tmp_path: Path) -> None:
    bare = Large()
    bare.words.sparse = True  # so that the head, which is tied, stays as well
    with pytest.raises(ValueError, match=rf"{shown_bytes(2 * BYTES)} of them for parameters in no shard") as caught:
        limited(bare, tmp_path, BYTES)
    least = int(str(caught.value).partition("pass memory=")[2].partition(",")[0])
    assert limited(bare, tmp_path, least)._homes.blocks == BLOCKS
    with pytest.raises(ValueError, match="the least that works") as caught:
        limited(Large(), tmp_path, BYTES)
    least = int(str(caught.value).partition("pass memory=")[2].partition(",")[0])
    assert 2 * BYTES < least < 2.1 * BYTES
    assert limited(Large(), tmp_path, least)._homes.blocks == ["words", *BLOCKS, "head"]


def test_the_slots_of_a_step_take_one_large_shard_and_two_blocks(tmp_path: Path) -> None:
    model = OffloadModel(Large(), "cpu", tmp_path, blocks=["words", "layers", "head"], checkpoint_activation=True)
    model(words()).square().mean().backward()
    block = model._homes.shards[1].slot_bytes
    held = model.statistics().peak_device_bytes
    assert held < 2.2 * BYTES + 3 * block  # one large slot, one large gradient
    assert model._homes.meter.held_bytes == 2 * block
