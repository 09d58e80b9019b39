"""Hooks of parameters run as in the loop without chunks: once a step, on the sum of all chunks and towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from tests.gradcache.towers import WAYS, by_step, offloaded, tower
from tests.gradients import assert_same_step

LOSS = SimpleContrastiveLoss()


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(tower(), nn.Linear(6, 6)).to(dtype)


def clamp(model: nn.Module, calls: list[str]) -> None:
    for name, parameter in model.named_parameters():

        def hook(gradient: Tensor, name: str = name) -> Tensor:
            calls.append(name)
            return gradient.clamp(-1e-3, 1e-3)

        parameter.register_hook(hook)


def step_in_backward(model: nn.Module, calls: list[str]) -> None:
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.Adam([parameter], lr=0.01)

        def hook(_: Tensor, name: str = name, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            calls.append(name)

        parameter.register_post_accumulate_grad_hook(hook)


HOOKS = [clamp, step_in_backward]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("way", [*WAYS, "offloaded inside"])
def test_hooks_run_once_on_the_sum_of_chunks_and_of_towers_that_share_a_parameter(
    way: str, hooks: Callable[[nn.Module, list[str]], None]
) -> None:
    expected, ours = net(), net()
    if way == "offloaded inside":
        ours[0] = offloaded(ours[0], num_slices=2)
    wanted: list[str] = []
    found: list[str] = []
    for model, calls in ((expected, wanted), (ours, found)):
        hooks(model, calls)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        x, y = torch.randn(2, 8, 8, dtype=torch.float64)
        LOSS(expected(x), expected(y)).backward()
        WAYS.get(way, by_step)([ours] * 2, 3, LOSS, x, y)
        torch.testing.assert_close(ours.state_dict(), expected.state_dict())
        assert_same_step([expected], [ours])
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("part", ["used outside, too", "used outside only"])
def test_hooks_see_the_sum_of_encode_and_of_the_callers_own_graph(part: str) -> None:
    expected, ours = net(), net()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    seen: list[list[Tensor]] = [[], []]
    for model, calls in zip((expected, ours), seen, strict=True):
        model[1].weight.register_hook(lambda gradient, calls=calls: calls.append(gradient.clone()))

    def loss(model: Any, a: Tensor, b: Tensor) -> Tensor:
        reps = LOSS(a, b) if part == "used outside, too" else 0.0
        return reps + model[1].weight.square().sum()

    loss(expected, expected(x), expected(y)).backward()
    loss(ours, *GradCache([ours, ours], 3, LOSS).encode(x, y)).backward()
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(ours[1].weight.grad, expected[1].weight.grad)


def test_a_hook_is_not_called_for_a_parameter_without_a_gradient() -> None:
    for way in ("step", "encode"):
        model, calls = net(), []
        model[1].unused = nn.Linear(3, 3)  # type: ignore[assignment]
        model[1].unused.weight.register_hook(calls.append)
        model[1].unused.weight.register_post_accumulate_grad_hook(calls.append)
        WAYS[way]([model] * 2, 3, LOSS, *torch.randn(2, 8, 8, dtype=torch.float64))
        assert calls == []
        assert model[1].unused.weight.grad is None


def test_no_hook_runs_in_a_step_that_fails_and_hooks_are_there_afterwards() -> None:
    model, calls = net(), []
    clamp(model, calls)
    forwards: list[int] = []

    def fails(module: nn.Module, args: Any, output: Any) -> None:
        forwards.append(1)
        if len(forwards) == 8:  # in the second pass
            raise RuntimeError("out of memory")

    handle = model.register_forward_hook(fails)
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="out of memory"):
        GradCache([model, model], 3, LOSS)(x, y)
    assert calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    GradCache([model, model], 3, LOSS)(x, y)
    assert len(calls) == 6


def test_no_gradient_is_copied_for_a_hook() -> None:
    """An optimizer steps in a hook to save the memory of gradients."""
    model = nn.Linear(8, 6, dtype=torch.float64)
    accumulate = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]
    seen: list[int] = []
    accumulate.register_prehook(lambda gradients: seen.append(gradients[0].data_ptr()))
    taken: list[int] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: taken.append(p.grad.data_ptr()))
    GradCache([model], 3, lambda r: r.square().sum())(torch.randn(8, 8, dtype=torch.float64))
    assert taken == seen[:1]


def test_an_optimizer_hooked_into_the_graph_is_refused_before_a_gradient_is_written() -> None:
    model = net()
    model[1].weight._in_backward_optimizers = [object()]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="_apply_optimizer_in_backward"):
        GradCache([model, model], 3, LOSS)(*torch.randn(2, 8, 8, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in model.parameters())
