"""An update is pending, on a lane that is late; then its parameters are read or written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.offload.late import LateLane
from tests.offload.pair import Pair
from tests.offload.scenarios.training import update_on
from tests.waits import Scenario, fails_with


def after_a_step(look: Callable[[Pair], None]) -> Scenario:
    """A scenario: one step is pending when ``look`` looks."""

    def scenario(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        update_on(monkeypatch, LateLane(0))
        pair = Pair("momentum", f"{path}/")
        pair.first = copy.deepcopy([pair.bare.state_dict(), pair.plain.state_dict()])  # type: ignore[attr-defined]
        pair.backward()
        pair.step()
        look(pair)

    scenario.__name__ = look.__name__
    return fails_with("Tensor-likes are not", "states of other parameters")(scenario)


def _same(pair: Pair, parameters: list[torch.Tensor]) -> None:
    for expected, got in zip(pair.bare.parameters(), parameters, strict=True):
        pair.assert_close(got, expected)


def _past_the_model(pair: Pair) -> list[torch.Tensor]:
    """The parameters, from what has to hold them itself."""
    return [*list.__iter__(pair.ours.param_groups[0]["params"])]


@fails_with("Tensor-likes are not")
def a_step_that_others_can_see_is_finished(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    update_on(monkeypatch, LateLane(0))
    pair = Pair("momentum", f"{path}/")
    kept = list(pair.model.parameters())
    pair.backward()
    pair.step()
    _same(pair, kept)


@after_a_step
def parameters_are_updated(pair: Pair) -> None:
    pair.assert_equal()


@after_a_step
def a_parameter_that_a_module_is_asked_for_is_updated(pair: Pair) -> None:
    modules = dict(pair.model.named_modules())
    for name, p in pair.bare.named_parameters():
        path, _, key = name.rpartition(".")
        pair.assert_close(getattr(modules[path], key), p)


@after_a_step
def what_a_collected_model_left_pending_is_updated(pair: Pair) -> None:
    layers = nn.ModuleList(pair.model)
    del pair.model, pair.ours
    _same(pair, list(layers.parameters()))


@after_a_step
def gradients_are_zeroed_after_their_use_by_the_optimizer(pair: Pair) -> None:
    pair.zero_in_place()
    pair.assert_equal()


@after_a_step
def a_closed_model_is_updated(pair: Pair) -> None:
    pair.model.close()
    _same(pair, _past_the_model(pair))


@after_a_step
def data_that_is_assigned_is_not_updated_by_an_earlier_step(pair: Pair) -> None:
    for parameters in (pair.bare.parameters(), _past_the_model(pair)):
        for p in parameters:
            p.data = torch.full_like(p, 0.5)
    pair.eval()
    pair.assert_equal()


@after_a_step
def a_second_step_is_a_second_update(pair: Pair) -> None:
    pair.step()
    pair.assert_equal()


@after_a_step
def synchronize_finishes_the_update(pair: Pair) -> None:
    pair.ours.synchronize()
    _same(pair, _past_the_model(pair))


@after_a_step
def parameters_of_groups_are_updated(pair: Pair) -> None:
    _same(pair, pair.ours.param_groups[0]["params"])


@after_a_step
def the_state_of_the_optimizer_is_updated(pair: Pair) -> None:
    pair.assert_equal_states()


@after_a_step
def a_loaded_optimizer_is_not_updated_by_an_earlier_step(pair: Pair) -> None:
    for optimizer in (pair.plain, pair.ours):
        state = copy.deepcopy(pair.first[1])  # type: ignore[attr-defined]
        for group in state["param_groups"]:
            group["lr"] = 0.5
        optimizer.load_state_dict(state)
    pair.assert_equal()
    pair.assert_equal_states()
