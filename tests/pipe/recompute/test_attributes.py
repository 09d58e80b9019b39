"""What modules keep as plain attributes counts a forward once, and a recomputation starts from what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from pipe.checkpoint import checkpoint
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.rerun import trial
from tests.pipe.recompute.states import again

WIDTH = 6


class Recurrent(nn.Module):
    """Carries a hidden state from call to call, counts its calls and lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None
        self.calls = 0
        self.seen: list[int] = []
        self.by_name: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x if self.state is None else x + self.state))
        self.state = y.detach()
        self.calls += 1
        self.seen.append(self.calls)
        self.by_name["calls"] += 1
        return y


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2)
        return x * self.scale


def by_checkpoints(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x)
        return x

    return run


def by_offload(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return OffloadModel(model, "cpu", num_slices=len(model), checkpoint_activation=True)


@pytest.mark.parametrize("wrap", [by_checkpoints, by_offload])
def test_a_hidden_state_enters_the_recomputation_as_it_entered_the_forward(wrap: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Recurrent(), nn.Linear(WIDTH, WIDTH), Recurrent())
    ours = copy.deepcopy(bare)
    run = wrap(ours)
    for step in range(3):
        x = torch.randn(4, WIDTH)
        for call, model in ((bare, bare), (run, ours)):
            (call(x).sum() + call(x * 2).pow(2).sum()).backward()
            for p in model.parameters():
                assert p.grad is not None
        for p, q in zip(bare.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-6, msg=f"step {step}")
        for a, b in zip((bare[0], bare[2]), (ours[0], ours[2]), strict=True):
            assert isinstance(a, Recurrent)
            assert isinstance(b, Recurrent)
            assert a.state is not None
            assert b.state is not None
            assert torch.equal(a.state, b.state)
            assert (a.calls, a.seen, a.by_name) == (b.calls, b.seen, b.by_name)


@pytest.mark.parametrize("wrap", [by_checkpoints, by_offload])
def test_a_tensor_that_is_changed_in_place_and_is_no_buffer_is_refused(wrap: Callable[..., Any]) -> None:
    run = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled()))
    with pytest.raises(RuntimeError, match=r"attribute 'scale', a tensor .* in place"):
        run(torch.randn(2, WIDTH))


def test_attributes_are_put_back_when_the_recomputation_fails() -> None:
    model = Recurrent()
    watched = WatchedModule(model)
    module_state = ModuleState(watched)
    model(torch.randn(2, WIDTH))
    module_state.record_changes()

    def fail() -> None:
        with again(module_state):
            assert (model.calls, model.seen, model.state) == (0, [], None)
            model(torch.randn(2, WIDTH))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (model.calls, model.seen, model.by_name) == (1, [1], {"calls": 1})


def test_what_changes_in_a_forward_that_is_only_tried_is_undone() -> None:
    model = Recurrent()
    with trial([WatchedModule(model)], []):
        model(torch.randn(2, WIDTH))
        assert model.calls == 1
    assert (model.calls, model.seen, model.state, model.by_name) == (0, [], None, {"calls": 0})
