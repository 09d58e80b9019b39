"""A table's gradient exists once, however many chunks add to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gradcache import GradCache
from offload import MemoryPolicy
from offload.engine.tables import rows_in_place, tables_of

ROWS, WIDTH = 20, 4
PLENTY = 1 << 20


class Dense(TorchDispatchMode):
    """Counts gradients that are as large as the table."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.embedding_dense_backward.default
        return func(*args, **(kwargs or {}))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Twice(nn.Module):
    """Looks up twice in one table, and uses it once more as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.table(tokens) + self.table(tokens.flip(0))) @ self.table.weight.T @ self.table.weight


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(self.table, tokens, use_reentrant=False)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Embedding(ROWS, WIDTH), "weight", Half())


TABLES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Embedding(ROWS, WIDTH),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=3),
    "norm": lambda: nn.Embedding(ROWS, WIDTH, max_norm=1.0),
    "frequency": lambda: nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(ROWS, WIDTH, sparse=True),
    "frozen": lambda: nn.Embedding(ROWS, WIDTH).requires_grad_(False),
    "bfloat16": lambda: nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16),
    "twice": Twice,
    "inner": Inner,
    "parametrized": parametrized,
}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.float()).mean(1)


def energy(reps: Tensor) -> Tensor:
    return (reps * reps.detach().exp()).sum()


def model_of(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(TABLES[kind](), Mean(), nn.Linear(WIDTH, WIDTH))


def tokens() -> Tensor:
    return torch.randint(0, ROWS, (8, 6), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("budget", [0, PLENTY])
def test_gradients_are_those_of_autograd(kind: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, ours = model_of(kind), model_of(kind)
    for model in (bare, ours):
        if model is bare:
            monkeypatch.setattr("offload.engine.tables._takes_rows", lambda weight, total: False)
        else:
            monkeypatch.undo()
        cache = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=budget, join_chunks=False))
        for _ in range(2):
            cache(tokens())
    for mine, theirs in zip(ours.parameters(), bare.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            difference = (mine.grad.to_dense() - theirs.grad.to_dense()).abs().max()
            assert difference <= (1e-6 if kind == "twice" else 0)


@pytest.mark.parametrize(
    ("kind", "dense"), [("plain", 1), ("padding", 1), ("inner", 1), ("frequency", 4), ("sparse", 0)]
)
@pytest.mark.parametrize("budget", [0, PLENTY])
def test_only_the_first_chunk_makes_a_gradient_of_the_table_s_size(kind: str, dense: int, budget: int) -> None:
    cache = GradCache([model_of(kind)], 2, energy, memory=MemoryPolicy(boundary_bytes=budget, join_chunks=False))
    cache(tokens())
    with Dense() as counted:
        cache(tokens())
    assert counted.count == dense


@pytest.mark.parametrize("listens", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_table_run_once_on_the_sum_of_all_chunks(listens: str) -> None:
    heard: list[Tensor] = []
    for memory in (None, MemoryPolicy(boundary_bytes=0, join_chunks=False)):
        weight = (model := model_of("plain"))[0].weight
        gradient = (lambda t: t) if listens == "register_hook" else lambda t: t.grad
        getattr(weight, listens)(lambda t, gradient=gradient: heard.append(gradient(t).clone()))
        GradCache([model], 2 if memory else 8, energy, memory=memory)(tokens())
    whole, chunks = heard
    torch.testing.assert_close(chunks, whole)


def test_no_hook_stays_on_a_table() -> None:
    model = model_of("plain")
    expected = copy.deepcopy(model)
    with rows_in_place(tables_of(model)):
        output = model(tokens())
    assert not model[0]._forward_hooks
    for each, result in ((model, output), (expected, expected(tokens()))):
        for parameter in each.parameters():
            parameter.grad = torch.ones_like(parameter)
        energy(result).backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
