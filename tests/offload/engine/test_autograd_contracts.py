"""What autograd promises of any module holds for an OffloadModel, or is refused before anything happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer

WIDTH = 8


def mlp(depth: int = 4, *, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))
    if tied:
        model[-1][0].weight = model[0][0].weight  # type: ignore[index, union-attr]
    return model


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def wrap(request: pytest.FixtureRequest, home: str) -> Callable[..., OffloadModel]:
    def wrap(bare: nn.Sequential, **more: Any) -> OffloadModel:
        return OffloadModel(copy.deepcopy(bare), "cpu", home, len(bare), request.param, **more)

    return wrap


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor | None], atol: float = 0.0) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=atol)


# --- gradients that were asked for ----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["all", "first", "third", "last", "x"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_layers_that_lead_to_nothing_that_was_asked_for_do_not_go_back(
    wrap: Callable[..., OffloadModel], which: str, microbatches: int
) -> None:
    bare = mlp()
    model = wrap(bare, num_microbatches=microbatches)
    seen: dict[nn.Module, set[str]] = {}
    for run in (bare, model):
        events = seen[run] = set[str]()
        for name, module in run.named_modules():
            if isinstance(module, nn.Linear):
                module.register_full_backward_pre_hook(lambda *_, n=name, e=events: e.add(f"before {n}"))
                module.register_full_backward_hook(lambda *_, n=name, e=events: e.add(f"after {n}"))
                module.register_forward_hook(
                    lambda _m, _a, y, n=name, e=events: (
                        (y.register_hook(lambda _: e.add(f"output of {n}")) if y.requires_grad else None) and None
                    )
                )
        parameters = list(run.parameters())
        x = batch().requires_grad_()
        chosen = {"all": parameters, "first": parameters[:1], "third": parameters[4:5], "last": parameters[-1:]}
        run(x).pow(2).sum().backward(inputs=chosen.get(which, [x]))
    assert seen[model] == seen[bare]
    assert_equal(gradients(model), gradients(bare), atol=1e-6)


def test_of_the_shards_before_all_that_was_asked_for_one_at_most_is_loaded(wrap: Callable[..., OffloadModel]) -> None:
    model = wrap(mlp(8))
    loss = model(batch()).sum()
    before = model.statistics().shard_loads
    torch.autograd.grad(loss, list(model.parameters())[-5])  # of shard 5; the last two are still in slots
    assert model.statistics().shard_loads - before <= 2  # one ahead of its use


# --- hooks of parameters --------------------------------------------------------------------------------------------


def test_hooks_beside_updates_in_backward_are_refused_before_a_shard_is_updated(home: str) -> None:
    model = OffloadModel(mlp(), "cpu", home, 4, True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    handle = next(iter(model.parameters())).register_hook(lambda gradient: gradient * 2)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="hooks"):
        model(batch()).sum().backward()
    assert all(map(torch.equal, before, model.parameters()))
    handle.remove()
    model(batch()).sum().backward()
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))
