"""Values that a model gets from files, in each form of fewer bytes: as from its layers, converted, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import DiskHome, OffloadModel, OffloadOptimizer, load_checkpoint, load_pretrained, save_checkpoint

WIDTH = 64  # so that states of matrices are encoded
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states in 8 bits": ({}, {"states": "8bit"}),
    "states in bfloat16": ({}, {"states": torch.bfloat16}),
    "gradients in bfloat16": ({"gradient_dtype": torch.bfloat16}, {}),
    "split weights": ({"store_dtype": "split"}, {}),
    "bfloat16 weights": ({"store_dtype": torch.bfloat16}, {}),
    "everything": ({"store_dtype": torch.bfloat16, "gradient_dtype": torch.bfloat16}, {"states": "8bit"}),
}
Made = tuple[OffloadModel, OffloadOptimizer]


def layers(device: str = "cpu", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def made(bare: nn.Sequential, home: Any, form: str | None, **more: Any) -> Made:
    of_model, of_optimizer = FORMS[form] if form else ({}, {})
    model = OffloadModel(bare, "cpu", home, 2, **of_model, **more)
    return model, OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, **of_optimizer)


def train(model: OffloadModel, optimizer: OffloadOptimizer) -> None:
    for k in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(k))).square().mean().backward()
        optimizer.step()


def values(model: OffloadModel, optimizer: OffloadOptimizer) -> list[Tensor]:
    states = (v for state in optimizer.state_dict()["state"].values() for v in state.values())
    return [value.clone() for value in (*model.state_dict().values(), *map(torch.as_tensor, states))]


def kept(tmp_path: Path, form: str) -> Made:
    """A home of exact weights that was kept."""
    made(layers(), DiskHome(tmp_path / "kept", keep=True), None)[0].close()
    return made(layers("meta"), DiskHome(tmp_path / "kept", keep=True), form)


def pretrained(tmp_path: Path, form: str) -> Made:
    save_checkpoint(tmp_path / "saved", layers())
    return made(layers("meta"), f"{tmp_path}/home/", form, pretrained=tmp_path / "saved")


def from_pretrained(tmp_path: Path, form: str) -> Made:
    save_checkpoint(tmp_path / "saved", layers())
    of_model, of_optimizer = FORMS[form]
    how: dict[str, Any] = {"model": lambda: layers(seed=1), "num_slices": 2, **of_model}
    model = OffloadModel.from_pretrained(tmp_path / "saved", "cpu", f"{tmp_path}/home/", **how)
    return model, OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, **of_optimizer)


def loaded(tmp_path: Path, form: str) -> Made:
    save_checkpoint(tmp_path / "saved", layers())
    model, optimizer = made(layers(seed=1), f"{tmp_path}/home/", form)
    load_pretrained(model, tmp_path / "saved")
    return model, optimizer


def checkpoint(tmp_path: Path, form: str) -> Made:
    """An exact checkpoint of before the first step, whose optimizer has no states."""
    save_checkpoint(tmp_path / "saved", *made(layers(), "cpu", None))
    model, optimizer = made(layers(seed=1), f"{tmp_path}/home/", form)
    load_checkpoint(tmp_path / "saved", model, optimizer)
    return model, optimizer


#: What is refused, and why.
REFUSED = {
    **dict.fromkeys(
        [(kept, "split weights"), (kept, "bfloat16 weights"), (kept, "everything")], r"expected DiskHome.keep=False."
    ),
    **dict.fromkeys([(checkpoint, "bfloat16 weights"), (checkpoint, "everything")], r"would lose digits"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "source", [kept, pretrained, from_pretrained, loaded, checkpoint], ids=lambda source: source.__name__
)
def test_values_from_files_train_as_those_of_the_layers_or_are_refused(
    tmp_path: Path, source: Callable[[Path, str], Made], form: str
) -> None:
    if (source, form) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[source, form]):
            source(tmp_path, form)
        if source is kept:  # and it is as it was
            model, _ = made(layers("meta"), DiskHome(tmp_path / "kept", keep=True), None)
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), layers().parameters(), strict=True))
            model.close()
        return
    found, expected = source(tmp_path, form), made(layers(), "cpu", form)
    for model in (found, expected):
        train(*model)
    assert all(torch.equal(a, b) for a, b in zip(values(*found), values(*expected), strict=True))
    found[0].close()


@pytest.mark.parametrize("form", [name for name in FORMS if name != "everything"])
def test_a_kept_home_of_one_form_is_adopted_by_the_exact_model(tmp_path: Path, form: str) -> None:
    """Where it can be kept at all: it holds weights, which have no form then."""
    if "weights" in form:
        with pytest.raises(ValueError, match=r"expected DiskHome.keep=False."):
            made(layers(), DiskHome(tmp_path, keep=True), form)
        assert not [*tmp_path.iterdir()]
        return
    model, optimizer = made(layers(), DiskHome(tmp_path, keep=True), form)
    train(model, optimizer)
    expected = [p.clone() for p in model.parameters()]
    model.close()
    again, _ = made(layers("meta"), DiskHome(tmp_path, keep=True), None)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), expected, strict=True))
    again.close()
