"""A checkpointed module is recomputed with the hooks that its forward had, whatever became of them since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe.checkpoint import checkpoint


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


def halve_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] * 0.5


def halve_gradient(module: nn.Module, inner: Any, outer: Any) -> Any:
    return tuple(g * 0.5 for g in inner)


def halve_outer(module: nn.Module, outer: Any) -> Any:
    return tuple(g * 0.5 for g in outer)


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(halve),
    "forward_pre": lambda module: module.register_forward_pre_hook(halve_input),
    "forward with kwargs": lambda module: module.register_forward_hook(
        lambda module, args, kwargs, output: output * 0.5, with_kwargs=True
    ),
    "backward": lambda module: module.register_full_backward_hook(halve_gradient),
    "backward_pre": lambda module: module.register_full_backward_pre_hook(halve_outer),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()


class Lazy(nn.Module):
    """Registers a hook in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(3, 3)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.inner.register_forward_hook(halve)
            self.ready = True
        y: Tensor = self.inner(x)
        return y


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [p.grad for p in (*model.parameters(), x)]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


def run(
    layers: nn.Sequential, between: Callable[[nn.Sequential], Any], forward: Callable[[Tensor], Any]
) -> list[Tensor]:
    x = batch()
    output = forward(x)
    between(layers)
    output.pow(2).sum().backward()
    return gradients(layers, x)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_registered_after_the_forward_is_not_in_its_recomputation(kind: str) -> None:
    plain, ours = model(), model()
    expected = run(plain, lambda m: REGISTER[kind](m[1]), plain)
    assert_same(run(ours, lambda m: REGISTER[kind](m[1]), lambda x: checkpoint(ours, x)), expected)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_removed_after_the_forward_is_in_its_recomputation(kind: str) -> None:
    plain, ours = model(), model()
    handles = {m: REGISTER[kind](m[1]) for m in (plain, ours)}
    expected = run(plain, lambda m: handles[m].remove(), plain)
    assert_same(run(ours, lambda m: handles[m].remove(), lambda x: checkpoint(ours, x)), expected)
    assert_same(run(ours, lambda m: None, lambda x: checkpoint(ours, x))[-1:], run(plain, lambda m: None, plain)[-1:])


def test_a_hook_that_removes_itself_is_in_the_recomputation_and_then_gone() -> None:
    def once(layers: nn.Sequential) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            handle.remove()
            return output * 0.5

        handle = layers[1].register_forward_hook(hook)

    plain, ours = model(), model()
    once(plain)
    once(ours)
    assert_same(run(ours, lambda m: None, lambda x: checkpoint(ours, x)), run(plain, lambda m: None, plain))
    assert not ours[1]._forward_hooks


def test_a_hook_that_a_forward_registers_is_in_its_recomputation() -> None:
    plain, ours = model(), model()
    for layers in (plain, ours):
        layers[1] = Lazy()
    assert_same(run(ours, lambda m: None, lambda x: checkpoint(ours, x)), run(plain, lambda m: None, plain))


def test_a_forward_set_after_the_forward_is_not_in_its_recomputation() -> None:
    def replace(layers: nn.Sequential) -> None:
        layers[1].forward = torch.sin  # type: ignore[method-assign]

    plain, ours = model(), model()
    expected = run(plain, replace, plain)
    assert_same(run(ours, replace, lambda x: checkpoint(ours, x)), expected)
    assert ours[1].forward is torch.sin


def test_hooks_are_the_modules_own_again_after_a_recomputation_that_fails() -> None:
    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        if failing:
            raise ValueError("in a hook")

    failing, ours = False, model()
    handle = ours[1].register_forward_hook(fail)
    output = checkpoint(ours, batch())
    handle.remove()
    later = ours[0].register_forward_hook(halve)
    hooks = ours[0]._forward_hooks
    failing = True
    with pytest.raises(ValueError, match="in a hook"):
        output.sum().backward()
    assert ours[0]._forward_hooks is hooks
    later.remove()
    assert not any(m._forward_hooks for m in ours.modules())


def test_counting_the_operations_of_a_forward_alone_does_not_disturb_its_backward() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    plain, ours = model(), model()

    def counted(x: Tensor) -> Any:
        with FlopCounterMode(display=False):
            return checkpoint(ours, x)

    assert_same(run(ours, lambda m: None, counted), run(plain, lambda m: None, plain))
