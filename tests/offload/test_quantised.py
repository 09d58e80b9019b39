"""Quantised bases: their parts are stored and loaded as bytes, and everything is equal to the plain quantised model."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.model
from offload import OffloadModel, OffloadOptimizer, load_checkpoint, load_pretrained, save_checkpoint
from tests.offload import side_by_side
from tests.offload.quantised import (
    KINDS,
    WIDTH,
    Packed,
    WithAttributes,
    assert_same,
    layers,
    plain_values,
    tower,
    train,
)
from tests.offload.test_faults import Faults

ADAPTERS = ["*.down.*", "*.up.*"]
FORMS: dict[str, tuple[Callable[[str], nn.Module], dict[str, Any]]] = {
    "layers": (layers, {"num_slices": 3}),
    "blocks": (tower, {"blocks": "layer"}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
recomputations = pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])


@kinds
@recomputations
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("resident", [None, ADAPTERS], ids=["streamed", "resident"])
def test_training_over_a_quantised_base_equals_the_plain_model(
    kind: str, recompute: bool, form: str, home: str, resident: Any
) -> None:
    make, given = FORMS[form]
    model = OffloadModel(make(kind), "cpu", home, checkpoint_activation=recompute, resident=resident, **given)
    bare = make(kind)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert_same(train(model), train(bare))
    assert_same(*([x for v in each.state_dict().values() for x in plain_values(v)] for each in (model, bare)))


@kinds
def test_a_state_dict_of_a_quantised_model_is_saved_and_loaded(kind: str, home: str) -> None:
    model, other = OffloadModel(layers(kind), "cpu", home, 2, checkpoint_activation=True), layers(kind, seed=1)
    train(model, steps=1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    if kind != "attributes":  # of these torch saves the bytes alone
        assert torch.equal(other(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))
    model.load_state_dict(layers(kind, seed=2).state_dict())
    if kind != "attributes":
        assert torch.equal(layers(kind, seed=2)(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))


@kinds
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_quantised_model_has_its_bytes(kind: str, form: str, how: str, home: str) -> None:
    make, given = FORMS[form]
    model: Any = OffloadModel(make(kind), "cpu", home, checkpoint_activation=True, **given)
    train(model, steps=1)
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.ones(1, WIDTH)
    assert torch.equal(copied(x), model(x))
    before = model(x)
    train(copied, steps=2)
    assert torch.equal(model(x), before)


@kinds
def test_a_checkpoint_holds_the_parts_of_quantised_weights(kind: str, tmp_path: Path) -> None:
    model = OffloadModel(layers(kind), "cpu", tmp_path / "a", 2, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    side_by_side.train(model, optimizer, [torch.ones(1, WIDTH)])
    optimizer.zero_grad()
    save_checkpoint(tmp_path / "saved", model, optimizer)
    other = OffloadModel(layers(kind, seed=1), "cpu", "cpu", 3, checkpoint_activation=True)
    load_checkpoint(tmp_path / "saved", other, OffloadOptimizer(other, torch.optim.AdamW, lr=0.1))
    assert torch.equal(other(torch.ones(1, WIDTH)), model(torch.ones(1, WIDTH)))
    assert_same(train(other, steps=1), train(model, steps=1))


def test_frozen_adapters_that_are_resident_end_backward_early(tmp_path: Path) -> None:
    model: Any = OffloadModel(
        tower("subclass"), "cpu", tmp_path, checkpoint_activation=True, blocks="layer", resident=ADAPTERS
    )
    for block in model.layer[:2]:
        block.down.requires_grad_(False)
        block.up.requires_grad_(False)
    model(torch.ones(1, WIDTH)).sum().backward()
    plan = str(model.plan()).split()
    begun = next(k for k, token in enumerate(plan) if token.startswith("B"))
    assert [token for token in plan if token.startswith("B")] == ["B3.0", "B2.0"]
    assert not {"L0", "L1"} & {*plan[begun:]}


# --- refusals ---------------------------------------------------------------------------------------------------------


class Sealed(Packed):
    """Cannot be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        raise NotImplementedError("sealed")


def with_weight(weight: Any) -> nn.Sequential:
    model = layers("subclass", blocks=2)
    model[1].base.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    return model


def trainable(kind: str) -> nn.Sequential:
    model = layers(kind, blocks=2)
    if kind == "attributes":
        weight = model[1].base.weight
        half = Tensor._make_subclass(WithAttributes, weight.data.half(), True)
        half.same, half.statistics = None, weight.statistics
        model[1].base.weight = half
    else:
        model[1].base.weight.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: trainable("subclass"), r"frozen, got a trainable Packed \(1.base.weight\)"),
        (lambda: trainable("attributes"), r"frozen, got a trainable WithAttributes \(1.base.weight\)"),
        (lambda: with_weight(Sealed(*Packed.pack(torch.ones(WIDTH, WIDTH)).parts())), "NotImplementedError: sealed"),
        (lambda: with_weight(Packed(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1).to_sparse())), "sparse_coo"),
        (lambda: with_weight(Packed(*(x.to("meta") for x in Packed.pack(torch.ones(2, 2)).parts()))), "meta device"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused_before_anything_moved(make: Any, reason: str, tmp_path: Path) -> None:
    model = make()
    before = [x.data_ptr() for v in model.state_dict(keep_vars=True).values() for x in plain_values(v)[:1]]
    with pytest.raises(TypeError, match=reason):
        OffloadModel(model, "cpu", tmp_path / "home", checkpoint_activation=True)
    assert [x.data_ptr() for v in model.state_dict(keep_vars=True).values() for x in plain_values(v)[:1]] == before
    assert not (tmp_path / "home").exists()


def test_a_quantised_weight_that_becomes_trainable_is_refused_by_the_next_forward() -> None:
    model = OffloadModel(tower("subclass"), "cpu", checkpoint_activation=True, blocks="layer")
    for weight in (model.layer[1].base.weight, model.head.weight):
        weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"weight.* require gradients"):
            model(torch.ones(1, WIDTH))
        weight.requires_grad_(False)
        model(torch.ones(1, WIDTH)).sum().backward()


def test_a_file_of_unquantised_weights_is_not_loaded_into_quantised_ones(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    save_checkpoint(tmp_path, plain)
    model = OffloadModel(nn.Sequential(layers("subclass")[0].base), "cpu", checkpoint_activation=True)
    with pytest.raises(ValueError, match=r"0\.weight is quantised in the model"):
        load_pretrained(model, tmp_path)


@kinds
def test_a_construction_that_fails_gives_quantised_weights_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = layers(kind), torch.ones(1, WIDTH)
    expected = model(x)
    Faults(monkeypatch, offload.model, "return_freed_memory", OSError("full")).fatal = 1
    with pytest.raises(OSError, match="full"):
        OffloadModel(model, "cpu", os.fspath(tmp_path) + os.sep, checkpoint_activation=True)
    monkeypatch.undo()
    assert torch.equal(model(x), expected)
    if kind == "attributes":
        weight = model[0].base.weight
        assert weight.same.data_ptr() == weight.data_ptr()
    assert_same(train(OffloadModel(model, "cpu", tmp_path, checkpoint_activation=True)), train(layers(kind)))
