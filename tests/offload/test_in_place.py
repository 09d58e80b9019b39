"""``offload`` changes the module that it gets, as ``fully_shard`` does: one object, of its class and with its names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, offload
from tests.offload.blocks.towers import Model, loss_of, make, words
from tests.offload.side_by_side import assert_equal, drawn

BLOCKS = "encoder.layer"


class Layers(nn.Sequential):
    """A Sequential of a class of its own, with a method and an attribute."""

    title = "layers"

    def first_bias(self) -> Tensor:
        first: Any = self[0]
        return first.bias  # type: ignore[no-any-return]


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*(nn.Linear(4, 4) for _ in range(3)))


def step(model: Any) -> Tensor:
    torch.manual_seed(3)
    loss = loss_of(model(words())) if isinstance(model, Model) else model(drawn(1, 2, 4)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("wrap", [offload, OffloadModel])
@pytest.mark.parametrize("make_model", [layers, make], ids=["sequential", "own forward"])
def test_the_model_that_was_given_is_offloaded(make_model: Any, wrap: Any) -> None:
    model = make_model()
    bare, kind, names = copy.deepcopy(model), type(model), list(model.state_dict())
    members = list(model.modules())
    blocks = {"blocks": BLOCKS} if isinstance(model, Model) else {"num_slices": 2}
    assert wrap(model, "cpu", **blocks) is model
    assert isinstance(model, OffloadModel)
    assert isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    assert list(model.state_dict()) == names
    assert all(ours is before for ours, before in zip(model.modules(), members, strict=True))
    for _ in range(2):
        assert torch.equal(step(bare), step(model))
        assert_equal(bare, model)
    assert model.statistics().shard_loads
    assert "D0" in str(model.plan())


def test_a_sequential_keeps_its_class_methods_and_indexing() -> None:
    model: Any = layers(Layers)
    members = list(model)
    offload(model, "cpu", num_slices=2)
    assert isinstance(model, Layers)
    assert model.title == "layers"
    assert model.first_bias() is members[0].bias
    assert (len(model), list(model), model[-1]) == (3, members, members[-1])
    some = model[1:]
    assert type(some) is Layers  # an ordinary one
    assert list(some) == members[1:]


@pytest.mark.parametrize("inside", [False, True])
def test_an_offloaded_model_is_refused(inside: bool) -> None:
    model = layers()
    bare = copy.deepcopy(model)
    offload(model, "cpu", num_slices=2)
    given = nn.Sequential(nn.Identity(), model) if inside else model
    with pytest.raises(TypeError, match="expected a model that is not offloaded yet"):
        offload(given, "cpu")
    assert torch.equal(step(bare), step(model))
    assert_equal(bare, model)
