"""Sparse gradients of embeddings, in every class that takes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint

ROWS, WIDTH = 20, 8

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def pair(home: str, kind: type[torch.optim.Optimizer], arguments: dict[str, Any], slices: int = 3) -> Any:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Flatten(1), nn.Linear(3 * WIDTH, 4))
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=slices, checkpoint_activation=True)
    return bare, kind(bare.parameters(), **arguments), model, OffloadOptimizer(model, kind, **arguments)


def train(steps: range, *pairs: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for step in steps:
        x = torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(step))
        for model, optimizer in pairs:
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, torch.Tensor) else value


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("name", list(CLASSES))
def test_sparse_gradients_update_as_in_the_plain_class(home: str, name: str, slices: int, tmp_path: Any) -> None:
    bare, plain, model, ours = pair(home, *CLASSES[name], slices=slices)
    train(range(4), (bare, plain), (model, ours))
    torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()))
    one, other = plain.state_dict()["state"], ours.state_dict()["state"]
    assert sorted(one) == sorted(other)
    for k in one:
        assert one[k].keys() == other[k].keys()
        for key, value in one[k].items():
            torch.testing.assert_close(dense(other[k][key]), dense(value))
    # States that are sparse survive a checkpoint, too.
    save_checkpoint(tmp_path / "c", model, ours)
    _, _, again, its_ours = pair(home, *CLASSES[name])
    load_checkpoint(tmp_path / "c", again, its_ours)
    train(range(4, 6), (bare, plain), (again, its_ours))
    torch.testing.assert_close(dict(again.state_dict()), dict(bare.state_dict()))
