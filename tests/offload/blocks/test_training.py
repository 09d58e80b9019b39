"""Models with blocks train with any optimizer; checkpoints hold and restore all of their parameters."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks.towers import Model, assert_equal, loss_of, make, words

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-2}),
]


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    choices = {"checkpoint_activation": True, "blocks": "encoder.layer", **choices}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **choices)


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    loss_of(model(words(seed=seed))).backward()


def train(model: nn.Module, optimizer: Any, seeds: range, max_norm: float | None = None) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@pytest.mark.parametrize(("kind", "choices"), CLASSES)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_offload_optimizers_update_parameters_outside_of_blocks(
    kind: Any, choices: dict[str, Any], max_norm: float | None, home: str, tmp_path: Path
) -> None:
    bare = make()
    model = wrap(bare, tmp_path if home == "disk" else "cpu")
    train(bare, kind(bare.parameters(), **choices), range(3), max_norm)
    optimizer = OffloadOptimizer(model, kind, max_norm=max_norm, **choices)
    train(model, optimizer, range(3))
    assert_equal(bare, model, exact=kind is torch.optim.SGD and max_norm is None)
    assert len(optimizer.state_dict()["state"]) == len(list(bare.parameters()))


def test_weights_of_blocks_that_are_read_outside_of_them_have_their_update(tmp_path: Path) -> None:
    """By the forward itself, before their block runs, and by other code after the step."""

    class Scaled(Model):
        def forward(self, words: Tensor, **inputs: Any) -> Any:
            scale = self.encoder.layer[2].linear.weight.detach().norm()
            return super().forward(words, extra=scale, **inputs)

    torch.manual_seed(0)
    bare = Scaled()
    model = wrap(bare, tmp_path)
    theirs, ours = torch.optim.SGD(bare.parameters(), lr=0.1), OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for seeds in (range(2), range(2, 4)):
        train(bare, theirs, seeds), train(model, ours, seeds)
        for block, mine in zip(bare.encoder.layer, model.encoder.layer, strict=True):
            assert torch.equal(block.linear.weight, mine.linear.weight)
    block = copy.deepcopy(model.encoder.layer[0])
    assert type(block.linear._parameters) is dict
    assert torch.equal(block.linear.weight, bare.encoder.layer[0].linear.weight)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
@pytest.mark.parametrize("part", ["encoder", "encoder.layer.1"])
def test_parts_of_the_model_are_copied_as_plain_modules(part: str, copied: Any, tmp_path: Path) -> None:
    bare = make(2, dropout=0.0)
    model = OffloadModel(copy.deepcopy(bare), "cpu", f"{tmp_path}/", checkpoint_activation=True, blocks="encoder.layer")
    train(bare, torch.optim.SGD(bare.parameters(), lr=0.1), range(1))
    train(model, OffloadOptimizer(model, torch.optim.SGD, lr=0.1), range(1))
    found, expected = copied(model.get_submodule(part)), bare.get_submodule(part)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_groups_by_name_reach_both_sides() -> None:
    bare = make()
    model = wrap(bare)
    named = dict(bare.named_parameters())
    biases = [p for n, p in named.items() if n.endswith("bias")]
    others = [p for n, p in named.items() if not n.endswith("bias")]
    train(bare, torch.optim.SGD([{"params": biases, "lr": 0.3}, {"params": others}], lr=0.1), range(2))
    optimizer = OffloadOptimizer(
        model, torch.optim.SGD, params=[{"params": "*bias", "lr": 0.3}, {"params": "*"}], lr=0.1
    )
    train(model, optimizer, range(2))
    assert_equal(bare, model)


def test_frozen_blocks_are_only_read(tmp_path: Path) -> None:
    bare = make()
    for name, p in bare.named_parameters():
        p.requires_grad_("linear.bias" in name)
    model = wrap(bare, tmp_path)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, optimizer, range(3))
    train(bare, torch.optim.AdamW(bare.parameters(), lr=0.01), range(3))
    assert_equal(bare, model, exact=False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    before = model.statistics()
    train(model, optimizer, range(1))
    after = model.statistics()
    assert after.bytes_stored - before.bytes_stored == trained
    assert after.update_bytes_written - before.update_bytes_written <= 3 * trained + 4096 * 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_update_of_parameters_outside_of_blocks_is_noticed_by_a_backward_that_saved_them(kind: Any) -> None:
    """A fused kernel, which is the default of an OffloadOptimizer where a class has one, counts no version."""
    model = wrap(make(), checkpoint_activation=False)
    optimizer = OffloadOptimizer(model, kind, lr=0.1)
    loss = loss_of(model(words()))
    outside = [model.masks.weight, model.norm.weight]
    loss.backward(retain_graph=True, inputs=outside)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(inputs=outside)
