"""Embedding tables of every kind, whose gradients chunks add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from gradcache import GradCache

ROWS, WIDTH = 20, 4


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


@pytest.mark.parametrize("kind", [kind for kind in TABLES if kind != "frequency"])  # which counts rows of a batch
def test_gradients_are_those_of_the_chunks_by_autograd(kind: str) -> None:
    bare, ours = model_of(kind), model_of(kind)
    for _ in range(2):
        energy(torch.cat([bare(part) for part in tokens().split(2)])).backward()
        GradCache([ours], 2, energy)(tokens())
    for mine, theirs in zip(ours.parameters(), bare.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("listens", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_table_run_once_on_the_sum_of_all_chunks(listens: str) -> None:
    heard: list[Tensor] = []
    for size in (8, 2):
        weight = (model := model_of("plain"))[0].weight
        gradient = (lambda t: t) if listens == "register_hook" else lambda t: t.grad
        getattr(weight, listens)(lambda t, gradient=gradient: heard.append(gradient(t).clone()))
        GradCache([model], size, energy)(tokens())
    whole, chunks = heard
    torch.testing.assert_close(chunks, whole)
