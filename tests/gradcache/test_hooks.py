"""Hooks of parameters run as in the loop without chunks: once a step, on the sum of all chunks and towers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import Accumulation, GradCache
from gradcache.functional import cached
from gradcache.loss import SimpleContrastiveLoss
from offload import OffloadModel

LOSS = SimpleContrastiveLoss()


class Tower(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


def net(dtype: torch.dtype = torch.float64) -> Tower:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    return Tower(inner).to(dtype)


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


def step_at_last(model: nn.Module, calls: list[str]) -> None:
    """A hook of several parameters, which autograd calls when it has all of their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def hook(gradients: Any) -> None:
        calls.extend(str(k) for k, gradient in enumerate(gradients) if gradient is not None)

    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), hook)
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    assert optimizer


HOOKS = [clamp, step_in_backward, step_at_last]


def plain(model: Tower, x: Tensor, y: Tensor) -> None:
    LOSS(model(x), model(y)).backward()


def by_step(model: Tower, x: Tensor, y: Tensor) -> None:
    GradCache([model, model], 3, LOSS)(x, y)


def by_encode(model: Tower, x: Tensor, y: Tensor) -> None:
    LOSS(*GradCache([model, model], 3, LOSS).encode(x, y)).backward()


def by_cached_calls(model: Tower, x: Tensor, y: Tensor) -> None:
    calls = [[cached(model)(part) for part in side.split(3)] for side in (x, y)]
    LOSS(*(torch.cat([leaf for leaf, _ in side]) for side in calls)).backward()
    with Accumulation(model.parameters()) as accumulation:
        for leaf, again in calls[0] + calls[1]:
            again(leaf)
        accumulation.commit()


WAYS = {"step": by_step, "encode": by_encode, "cached": by_cached_calls}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_once_on_the_sum_of_chunks_and_of_towers_that_share_a_parameter(
    way: str, hooks: Callable[[nn.Module, list[str]], None]
) -> None:
    expected, ours = net(), net()
    wanted: list[str] = []
    found: list[str] = []
    for model, calls in ((expected, wanted), (ours, found)):
        hooks(model, calls)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        x, y = torch.randn(2, 8, 8, dtype=torch.float64)
        plain(expected, x, y)
        WAYS[way](ours, x, y)
        for a, b in zip(expected.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(b, a)
            torch.testing.assert_close(b.grad, a.grad)
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("execution", ["plain", "model inside"])
def test_hooks_run_once_however_the_tower_runs(execution: str) -> None:
    expected, ours = net(torch.float32), net(torch.float32)
    wanted: list[str] = []
    found: list[str] = []
    clamp(expected, wanted)
    tower: nn.Module = nn.Sequential(ours.inner, ours.head)
    if execution == "plain":
        clamp(ours, found)
    else:
        clamp(ours.head, found)
        ours.inner = OffloadModel(ours.inner, "cpu", num_slices=2, checkpoint_activation=True)
        clamp(ours.inner, found)
        tower = ours
    x, y = torch.randn(2, 8, 8)
    plain(expected, x, y)
    GradCache([tower, tower], 3, LOSS)(x, y)
    assert len(found) == len(wanted)
    for a, b in zip(expected.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("part", ["used outside, too", "used outside only"])
def test_hooks_see_the_sum_of_encode_and_of_the_callers_own_graph(part: str) -> None:
    expected, ours = net(), net()
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    seen: list[list[Tensor]] = [[], []]
    for model, calls in zip((expected, ours), seen, strict=True):
        model.head.weight.register_hook(lambda gradient, calls=calls: calls.append(gradient.clone()))

    def loss(model: Tower, a: Tensor, b: Tensor) -> Tensor:
        reps = LOSS(a, b) if part == "used outside, too" else 0.0
        return reps + model.head.weight.square().sum()

    loss(expected, expected(x), expected(y)).backward()
    loss(ours, *GradCache([ours, ours], 3, LOSS).encode(x, y)).backward()
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(ours.head.weight.grad, expected.head.weight.grad)


def test_a_hook_is_not_called_for_a_parameter_without_a_gradient() -> None:
    for way in (by_step, by_encode):
        model, calls = net(), []
        model.unused = nn.Linear(3, 3)  # type: ignore[assignment]
        model.unused.weight.register_hook(calls.append)
        model.unused.weight.register_post_accumulate_grad_hook(calls.append)
        way(model, *torch.randn(2, 8, 8, dtype=torch.float64))
        assert calls == []
        assert model.unused.weight.grad is None


def test_hooks_see_narrow_gradients_summed_in_32_bits_in_the_type_of_the_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).bfloat16()
    x = torch.rand(512, 16).bfloat16()
    seen: list[Tensor] = []
    model.weight.register_hook(seen.append)
    GradCache([model], 1, lambda r: r.float().sum())(x)
    (gradient,) = seen
    exact = x.double().sum(0).expand(8, 16)
    assert gradient.dtype == torch.bfloat16
    assert float((gradient.double() - exact).norm() / exact.norm()) < 0.01


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
        by_step(model, x, y)
    assert calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    handle.remove()
    by_step(model, x, y)
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
    assert taken == seen[-1:]


def test_an_optimizer_hooked_into_the_graph_is_refused_before_a_gradient_is_written() -> None:
    model = copy.deepcopy(net())
    model.head.weight._in_backward_optimizers = [object()]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="_apply_optimizer_in_backward"):
        by_step(model, *torch.randn(2, 8, 8, dtype=torch.float64))
    assert all(parameter.grad is None for parameter in model.parameters())
