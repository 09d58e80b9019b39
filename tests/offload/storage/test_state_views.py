"""Saving by torch and pickling work as for the bare model, whatever types a home holds and whatever layers keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel

WIDTH = 4


class Cast(nn.Module):
    """Computes in the type of its weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.to(self.linear.weight.dtype))
        return y.double()


def mixed(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Cast(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32, torch.float64)))
    if tied:
        model[3].linear.weight = model[0].linear.weight
    return model


def test_a_state_dict_of_several_types_is_the_weights_themselves(home: str) -> None:
    model = OffloadModel(mixed(), "cpu", home, 1, checkpoint_activation=False)
    parameters = dict(model.named_parameters())
    versions = {name: p._version for name, p in parameters.items()}
    for value in model.state_dict().values():
        value.fill_(3)
    assert all(bool((p == 3).all()) for p in parameters.values())
    assert all(p._version > versions[name] for name, p in parameters.items())
    state = model.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(4)
    assert all(bool((value == 4).all()) for value in state.values())
    assert all(isinstance(value, nn.Parameter) for value in model.state_dict(keep_vars=True).values())


def test_a_write_to_a_state_dict_of_several_types_before_the_backward_is_refused(home: str) -> None:
    model = OffloadModel(mixed(), "cpu", home, 1, checkpoint_activation=False)
    output = model(torch.ones(2, WIDTH, dtype=torch.float64))
    model.state_dict()["1.linear.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()
