"""Saving by torch and pickling work as for the bare model, whatever types a home holds and whatever layers keep."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import weight_norm

from offload import OffloadModel, OffloadOptimizer

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


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_dict_of_several_types_in_one_home_is_saved_by_torch(home: str, tied: bool) -> None:
    bare = mixed(tied=tied)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 2, checkpoint_activation=False)
    saved, expected = through_a_file(model.state_dict()), bare.state_dict()
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    same = saved["0.linear.weight"].data_ptr() == saved["3.linear.weight"].data_ptr()
    assert same is (tied and model._homes.shards[0].home is not None)


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


def trained(model: OffloadModel) -> OffloadModel:
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _made(home: str, **choices: Any) -> OffloadModel:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    layers[3].weight = layers[1].weight
    return OffloadModel(layers, "cpu", home, 2, checkpoint_activation=True, **choices)


def _in_memory(home: str) -> OffloadModel:
    """Layers compute with the homes of the first shard."""
    model = trained(_made(home))
    model._homes.keep_in_memory([0])
    return model


def _assigned(home: str) -> OffloadModel:
    model = _made(home)
    for p in model.parameters():
        p.data = torch.ones_like(p)
    return model


MADE: dict[str, Callable[[str], OffloadModel]] = {
    "new": _made,
    "trained": lambda home: trained(_made(home)),
    "in memory": lambda home: trained(_in_memory(home)),
    "returned to files": lambda home: (model := _in_memory(home), model._homes.keep_in_memory([]))[0],
    "resident": lambda home: trained(_made(home, resident="*.bias")),
    "cast": lambda home: trained(_made(home, param_dtype=torch.bfloat16)),
    "split": lambda home: trained(_made(home, store_dtype="split")),
    "rounded": lambda home: trained(_made(home, store_dtype=torch.bfloat16)),
    "assigned": lambda home: trained(_assigned(home)),
    "copied": lambda home: copy.deepcopy(trained(_made(home))),
}


@pytest.mark.parametrize("made", MADE)
def test_each_tensor_of_a_state_dict_has_a_storage_of_its_own_and_tied_ones_share(made: str, home: str) -> None:
    """By that libraries find out which weights are tied, and what to write."""
    model = MADE[made](home)
    state = dict(model.state_dict())
    places: dict[int, set[str]] = {}
    for name, value in state.items():
        storage = value.untyped_storage()
        assert (storage.nbytes(), value.storage_offset()) == (value.nbytes, 0), name
        places.setdefault(storage.data_ptr(), set()).add(name)
    tied = [names for names in places.values() if len(names) > 1]
    assert tied == [{"1.weight", "3.weight"}]
    assert len(pickle.dumps(state["0.weight"])) < len(pickle.dumps(torch.zeros(WIDTH, WIDTH))) + 100
    for name, value in through_a_file(state).items():
        assert torch.equal(value, state[name])
    trained(model)  # a state_dict is no obstacle, and shows later steps where it is no copy
    if made not in ("split",):
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_parameter_that_was_put_into_shared_memory_returns_home_with_a_warning(home: str) -> None:
    model = _made(home)
    with torch.no_grad():
        model[0].weight.share_memory_().fill_(2)
    with pytest.warns(RuntimeWarning, match=r"parameters \(0.weight\) were moved to shared memory.*Send copies"):
        trained(model)
    assert not model[0].weight.is_shared()
    assert not torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 2.0))  # and takes part in the training
    with pytest.raises(RuntimeError, match="cannot move to shared memory"):
        model.share_memory()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_under_the_old_weight_norm_is_pickled(home: str) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), weight_norm(nn.Linear(WIDTH, WIDTH)))
    x = torch.ones(2, WIDTH)
    expected = bare(x)
    model = pickle.loads(pickle.dumps(OffloadModel(bare, "cpu", home, 2, checkpoint_activation=False)))
    assert torch.equal(model(x), expected)
