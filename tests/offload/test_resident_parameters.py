"""Parameters that stay on the compute device while the layers around them stream: adapters, with their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadModel, OffloadOptimizer
from tests.offload.quantised import WIDTH, assert_same, layers, tower

ADAPTERS = ["*.down.*", "*.up.*"]


def wrap(form: str, home: Any, recompute: bool = True, **more: Any) -> Any:
    given: dict[str, Any] = {"num_slices": 3} if form == "layers" else {"blocks": "layer"}
    more = {"resident": ADAPTERS, **more}
    return OffloadModel(bare(form), "cpu", home, checkpoint_activation=recompute, **given, **more)


def bare(form: str) -> Any:
    return layers("subclass") if form == "layers" else tower("subclass")


def train(model: Any, steps: int = 3, **options: Any) -> list[Tensor]:
    """Outputs and gradients of some steps, and the adapters after them."""
    offloaded, adam = isinstance(model, OffloadModel), torch.optim.AdamW
    arguments: dict[str, Any] = {"lr": 0.1, "fused": True}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = OffloadOptimizer(model, adam, **arguments, **options) if offloaded else adam(trained, **arguments)
    seen = []
    for k in range(steps):
        y = model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(k)))
        y.square().sum().backward()
        seen += [y.detach().clone(), *(p.grad.clone() for p in trained if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in trained)]


forms = pytest.mark.parametrize("form", ["layers", "blocks"])


@forms
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_resident_adapters_train_as_in_the_plain_model(form: str, recompute: bool, home: str) -> None:
    assert_same(train(wrap(form, home, recompute)), train(bare(form)))


def test_frozen_adapters_that_are_resident_end_backward_early(tmp_path: Path) -> None:
    model = wrap("blocks", tmp_path)
    for block in model.layer[:2]:
        block.down.requires_grad_(False)
        block.up.requires_grad_(False)
    model(torch.ones(1, WIDTH)).sum().backward()
    plan = str(model.plan()).split()
    begun = next(k for k, token in enumerate(plan) if token.startswith("B"))
    assert [token for token in plan if token.startswith("B")] == ["B3.0", "B2.0"]
    assert not {"L0", "L1"} & {*plan[begun:]}


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"resident": "*.lora_*"}, ValueError, "matches none"),
        ({"resident": 3}, TypeError, "patterns of parameter names"),
        ({"resident": "*.base.weight.*"}, ValueError, "is quantised"),
    ],
)
def test_what_cannot_be_resident_is_refused(given: Any, error: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=reason):
        wrap("layers", tmp_path, **given)
