"""Checkpoints of torchgpipe and fairscale load into a Pipe."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe

WIDTH = 3


def layers() -> nn.Sequential:
    first, inner, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    named = {"first": first, "norm": nn.BatchNorm1d(WIDTH), "2": nn.Sequential(inner, nn.ReLU()), "last": last}
    return nn.Sequential(OrderedDict(named))


def saved(module: nn.Sequential, balance: list[int], prefix: str = "") -> dict[str, Tensor]:
    """The state of a module, named as torchgpipe names it."""
    partitions = [j for j, layers_of_it in enumerate(balance) for _ in range(layers_of_it)]
    partition = dict(zip(module._modules, partitions, strict=True))
    return {
        f"{prefix}partitions.{partition[name.split('.')[0]]}.{name}": value
        for name, value in module.state_dict().items()
    }


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("theirs", [[1, 3], [2, 1, 1], [4]])
def test_a_checkpoint_of_torchgpipe_loads_whatever_its_balance(theirs: list[int], strict: bool) -> None:
    source, pipe = layers(), Pipe(layers(), [2, 2], ["cpu", "cpu"])
    state = saved(source, theirs)
    assert "partitions.0.first.weight" in state
    names = list(state)
    result = pipe.load_state_dict(state, strict=strict)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert list(state) == names, "the checkpoint itself was changed"
    for name, value in source.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], value), name


def test_a_pipe_inside_a_model_loads_it_too() -> None:
    source = layers()
    model = nn.ModuleDict({"body": Pipe(layers(), [2, 2], ["cpu", "cpu"]), "head": nn.Linear(1, 1)})
    state = {**saved(source, [2, 2], "body."), **model["head"].state_dict(prefix="head.")}
    model.load_state_dict(state)
    assert torch.equal(model["body"][0].weight, source[0].weight)


def test_names_of_its_own_load_as_ever_and_foreign_ones_are_named() -> None:
    pipe = Pipe(layers(), [2, 2], ["cpu", "cpu"])
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "partitions.0.other.weight"'):
        pipe.load_state_dict({**pipe.state_dict(), "partitions.0.other.weight": torch.zeros(1)})


@pytest.mark.parametrize("strict", [True, False])
def test_two_values_for_one_parameter_are_refused(strict: bool) -> None:
    """As of a checkpoint whose layers count from 0 in each partition."""
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], ["cpu", "cpu"])
    one = torch.zeros(1, 1)
    state = {"partitions.0.0.weight": one, "partitions.1.0.weight": one}
    with pytest.raises(RuntimeError, match=r"several for one parameter, 0\.weight, one of them partitions\.1\.0"):
        pipe.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError, match="several for one parameter"):
        pipe.load_state_dict({"partitions.0.0.weight": one, "0.weight": one}, strict=strict)


def test_a_layer_that_is_called_partitions_keeps_its_name() -> None:
    module = nn.Sequential(OrderedDict(partitions=nn.Sequential(nn.Sequential(nn.Linear(1, 1)))))
    pipe = Pipe(module, [1])
    pipe.load_state_dict(pipe.state_dict())
    assert list(pipe.state_dict()) == ["partitions.0.0.weight", "partitions.0.0.bias"]
