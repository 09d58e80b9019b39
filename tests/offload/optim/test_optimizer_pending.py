"""step() returns before anything is updated, and a read through the model applies pending updates."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.open_files import open_files
from tests.offload.pair import Pair, pending
from tests.offload.zoo import WIDTH, build


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates run only when they are waited for; returns the tokens of those that ran."""
    from tests.offload.late import LateLane

    lane = LateLane()
    monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: lane)
    return lane.log


def test_step_returns_before_anything_is_updated(home: str, held: list[str]) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    pair.zero()
    assert held == []
    assert pending(pair.model) == [0, 1, 2, 3]
    pair.eval()
    assert sorted(held) == ["U0", "U1", "U2", "U3"]
    assert pending(pair.model) == []
    pair.assert_equal()


def _copied(found: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in dict(found).items()}


#: How code reads the weights of ``net``.
READS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda net: _copied(net.state_dict()),
    "named_parameters": lambda net: _copied(net.named_parameters()),
    "parameters": lambda net: _copied(zip(dict(net.state_dict()), net.parameters(), strict=True)),
    "get_parameter": lambda net: _copied((name, net.get_parameter(name)) for name in _names(net)),
    "attributes": lambda net: _copied((n, functools.reduce(getattr, n.split("."), net)) for n in _names(net)),
    "deepcopy": lambda net: _copied(copy.deepcopy(net).state_dict()),
    "pickle": lambda net: _copied(pickle.loads(pickle.dumps(net)).state_dict()),
    "parts": lambda net: {f"{k}.{n}": v for k, m in net.named_children() for n, v in _copied(m.state_dict()).items()},
    "around": lambda net: _copied(nn.ModuleDict({"a": net}).get_submodule("a").state_dict()),
    "registers": lambda net: {
        ".".join(filter(None, (path, k))): v
        for path, m in net.named_modules()
        for k, v in _copied(m._parameters).items()
    },
    "loaded in part": lambda net: (net.load_state_dict({}, strict=False), _copied(net.state_dict()))[1],
    "in a thread": lambda net: ThreadPoolExecutor(1).submit(lambda: _copied(net.state_dict())).result(),
}


def _names(net: nn.Module) -> list[str]:
    return [".".join(filter(None, (path, key))) for path, m in net.named_modules() for key in m._parameters]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("of", ["an optimizer", "a collected optimizer"])
def test_whatever_reads_weights_finds_those_of_the_last_step(read: str, of: str, home: str, held: list[str]) -> None:
    bare = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.5)
    for run, step in ((bare, torch.optim.SGD(bare.parameters(), lr=0.5).step), (model, optimizer.step)):
        run(torch.ones(2, WIDTH)).sum().backward()
        step()
    assert pending(model)
    if of == "a collected optimizer":
        del run, step, optimizer
    torch.testing.assert_close(READS[read](model), dict(bare.state_dict()), rtol=0, atol=0)


def test_what_a_collected_model_left_pending_ends_with_the_layers(tmp_path: Path) -> None:
    """Its files are there until then, and no longer."""
    pair = Pair("adamw", f"{tmp_path}/")
    pair.backward()
    pair.step()
    layers = nn.ModuleList(pair.model)
    pair.schedules.clear()
    del pair.ours, pair.model
    assert open_files(tmp_path, "weights")
    for expected, got in zip(pair.bare.parameters(), layers.parameters(), strict=True):
        pair.assert_close(got, expected)
    gc.collect()
    assert not open_files(tmp_path)
    pair = Pair("adamw", f"{tmp_path}/")
    pair.backward()
    pair.step()
    del pair
    gc.collect()
    assert not open_files(tmp_path)


def test_layers_that_are_wrapped_again_keep_the_updates_of_both_models(home: str, held: list[str]) -> None:
    pair = Pair("sgd", home)
    first, optimizer = pair.model, pair.ours
    pair.backward()
    pair.step()
    pair.model = OffloadModel(nn.Sequential(*first), "cpu", home, num_slices=2, checkpoint_activation=True)
    pair.ours = OffloadOptimizer(pair.model, torch.optim.SGD, lr=0.05)
    pair.zero()
    for _ in range(2):
        pair.backward()
        pair.step()
        pair.zero()
    pair.model, pair.ours = first, optimizer  # the first one still finds the layers' present values
    pair.backward()
    pair.step()
    pair.assert_equal()


def test_zero_grad_does_not_finish_pending_updates(home: str, held: list[str]) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    pair.zero()
    pair.model_zero()
    assert len(pending(pair.model)) == 4


def test_a_schedule_that_steps_after_step_does_not_change_the_pending_update(home: str, held: list[str]) -> None:
    pair = Pair("sgd", home)
    for action in ("backward", "step", "schedule", "zero", "backward", "step", "zero"):
        pair.do(action)
    for group in pair.ours.param_groups:
        group["lr"] = 1e6
    for group in pair.plain.param_groups:
        group["lr"] = 1e6
    pair.assert_equal()


def test_a_backward_after_step_belongs_to_neither_value_and_says_so(home: str) -> None:
    pair = Pair("sgd", home)
    pair.backward()
    loss = pair.model(pair.batch()).sum()
    pair.step()
    with pytest.raises(RuntimeError, match="changed in place between the forward and its backward"):
        loss.backward()
    pair.assert_equal()


def test_a_learning_rate_in_a_tensor_is_noted_too(home: str, held: list[str]) -> None:
    """Schedules write into such a tensor in place."""
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=False)
    plain = torch.optim.SGD(bare.parameters(), lr=torch.tensor(0.1))
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=torch.tensor(0.1))
    for run, optimizer in ((bare, plain), (model, ours)):
        run(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(1e6)
    for b, c in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(b, c)
