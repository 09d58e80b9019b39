"""Inside frozen_weights what one call loaded serves the next; outside, every write is seen by the next call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel
from tests.offload.zoo import WIDTH, build


def make(home: str = "cpu", slots: int = 4) -> tuple[nn.Sequential, OffloadModel]:
    bare = build(["linear", "linear"])
    layers = copy.deepcopy(bare)
    return bare, OffloadModel(
        layers, "cpu", home, num_slices=4, memory=MemoryPolicy.fixed(slots=slots), checkpoint_activation=True
    )


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def infer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(batch())
    return output


def loads(model: OffloadModel) -> int:
    """Loads of one call."""
    before = model.statistics().shard_loads
    infer(model)
    return model.statistics().shard_loads - before


def test_with_frozen_weights_inference_loads_nothing_once_all_fits(home: str) -> None:
    bare, model = make(home)
    held = list(model.parameters())  # a list of parameters does not matter
    with model.frozen_weights():
        assert [loads(model) for _ in range(4)] == [4, 0, 0, 0]
        assert torch.equal(infer(model), infer(bare))
        with torch.inference_mode():
            model(batch())
        model.eval()
        assert loads(model) == 0
    assert [loads(model) for _ in range(2)] == [4, 4]  # outside, they might have been written to
    _, tight = make(home, slots=3)
    with tight.frozen_weights():
        assert [loads(tight) for _ in range(3)][1:] == [2, 2]  # the cache of a cycle that does not fit
    del held


def _first(model: nn.Module) -> nn.Parameter:
    return next(model.children()).weight  # type: ignore[return-value]


HOLDS: dict[str, Callable[[nn.Module], Any]] = {
    "parameter": _first,
    "list": lambda model: list(model.parameters()),
    "data": lambda model: _first(model).data,
    "detached": lambda model: _first(model).detach(),
    "view": lambda model: _first(model).detach().view(-1)[3:],
    "numpy": lambda model: _first(model).detach().numpy(),
    "state_dict": lambda model: dict(model.state_dict())["0.weight"],
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1).param_groups[0]["params"][0],
}


@pytest.mark.parametrize("when", ["before wrapping", "after", "between calls"])
@pytest.mark.parametrize("hold", list(HOLDS))
def test_a_held_parameter_may_be_written_at_any_time(hold: str, when: str, home: str) -> None:
    bare = build(["linear"])
    layers = copy.deepcopy(bare)
    held = HOLDS[hold](layers) if when == "before wrapping" else None
    model = OffloadModel(
        layers, "cpu", home, num_slices=3, memory=MemoryPolicy.fixed(slots=3), checkpoint_activation=True
    )
    if when == "after":
        held = HOLDS[hold](model)
    infer(model)
    if when == "between calls":
        held = HOLDS[hold](model)
    infer(model)
    if isinstance(held, list):
        held = held[0]
    held = held.data if isinstance(held, nn.Parameter) else held
    held *= 2
    _first(bare).data.copy_(_first(model))
    assert torch.equal(infer(model), infer(bare))
