"""A checkpointed module is recomputed with the hooks that its forward had, whatever became of them since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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


Change = Iterator[None]  # before a forward, between it and its backward, and after both


def registered(kind: str, layers: nn.Sequential) -> Change:
    yield
    REGISTER[kind](layers[1])


def removed(kind: str, layers: nn.Sequential) -> Change:
    handle = REGISTER[kind](layers[1])
    yield
    handle.remove()


def removes_itself(layers: nn.Sequential) -> Change:
    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * 0.5

    handle = layers[1].register_forward_hook(hook)
    yield


def registers_in_its_forward(layers: nn.Sequential) -> Change:
    layers[1] = Lazy()
    yield


def another_forward(layers: nn.Sequential) -> Change:
    yield
    layers[1].forward = torch.sin  # type: ignore[method-assign]


def counts_the_operations_of_the_forward(layers: nn.Sequential) -> Change:
    with FlopCounterMode(display=False):
        yield


CHANGES: dict[str, Callable[[nn.Sequential], Change]] = {
    **{f"{change.__name__} {kind}": partial(change, kind) for change in (registered, removed) for kind in REGISTER},
    "removes itself": removes_itself,
    "registers in its forward": registers_in_its_forward,
    "another forward": another_forward,
    "counted": counts_the_operations_of_the_forward,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recomputation_has_the_hooks_and_the_forward_of_its_forward(change: str) -> None:
    found, left = [], []
    for recomputed in (False, True):
        layers, x = model(), batch()
        steps = CHANGES[change](layers)
        next(steps)
        output = checkpoint(layers, x) if recomputed else layers(x)
        next(steps, None)
        output.pow(2).sum().backward()
        next(steps, None)
        found.append([p.grad for p in (*layers.parameters(), x)])
        assert all(g is not None for g in found[-1])
        left.append([(len(m._forward_hooks), m.forward is torch.sin) for m in layers.modules()])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]
    assert left[0] == left[1]


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
