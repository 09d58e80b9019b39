"""Towers that are an ``nn.Sequential`` of layers of every kind: a step has the results of the loss of all chunks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from offload import OffloadModel
from pipe import is_recomputing


class AcrossRows(nn.Module):
    """Looks across the rows of a chunk, without a buffer that would betray it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def layers(*kinds: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    make = {
        "linear": lambda: nn.Linear(8, 8),
        "tanh": nn.Tanh,
        "dropout": lambda: nn.Dropout(0.5),
        "norm": lambda: nn.BatchNorm1d(8),
        "across": AcrossRows,
        "inplace": InPlace,
        "relu": lambda: nn.ReLU(inplace=True),
        "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
        "block": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        "dropping": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.5)),
    }
    return nn.Sequential(*(make[kind]() for kind in kinds))


def energy(*reps: Tensor) -> Tensor:
    return torch.stack([(rep * rep.detach().exp()).sum() for rep in reps]).sum()


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.sampled_from(["linear", "tanh", "norm", "across", "inplace", "relu", "frozen", "block"]),
        min_size=1,
        max_size=6,
    ),
    rows=st.integers(2, 12),
    size=st.integers(2, 5),
    input_gradient=st.booleans(),
    tied=st.booleans(),
    steps=st.integers(1, 2),
)
def test_a_step_equals_the_loss_of_all_chunks_for_every_combination_of_layers(
    assert_same_gradients: Any, kinds: list[str], rows: int, size: int, input_gradient: bool, tied: bool, steps: int
) -> None:
    # Plain torch refuses to write over what the layer before has saved for its backward.
    pairs = itertools.pairwise(kinds)
    assume(not any(before in ("tanh", "relu") and after in ("inplace", "relu") for before, after in pairs))
    if rows % size == 1:
        rows += 1  # BatchNorm needs two rows in a chunk
    bare, ours = layers(*kinds, "linear"), layers(*kinds, "linear")
    x = torch.randn(rows, 8)
    inputs = [x.clone().requires_grad_(input_gradient) for _ in range(2)]
    towers = 2 if tied else 1
    step = GradCache([ours] * towers, size, energy)
    for _ in range(steps):
        # A layer may write into what it gets.
        parts = [[part.clone() for part in inputs[0].split(size)] for _ in range(towers)]
        expected = energy(*[torch.cat([bare(part) for part in each]) for each in parts])
        expected.backward()
        torch.testing.assert_close(step(*[inputs[1]] * towers), expected.detach())
    assert_same_gradients([bare], [ours], tolerance=1e-5)
    for mine, theirs in zip(ours.buffers(), bare.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    if input_gradient:
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def test_a_layer_that_is_thawed_after_a_step_gets_its_gradient(assert_same_gradients: Any) -> None:
    bare, ours = layers("block", "block", "linear"), layers("block", "block", "linear")
    step = GradCache([ours], 2, energy)
    for frozen in (True, False):
        x = torch.randn(8, 8)
        for model in (bare, ours):
            model[1].requires_grad_(not frozen)
        energy(bare(x)).backward()
        step(x)
    assert_same_gradients([bare], [ours], tolerance=1e-5)


class Counts(nn.Module):
    """Counts its calls in Python, as ``is_recomputing`` asks it to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.calls += 1
        hidden: Tensor = self.linear(x).tanh()
        return hidden


@pytest.mark.parametrize("execution", ["two passes", "shards"])
def test_a_layer_that_counts_its_calls_counts_every_chunk_once(execution: str) -> None:
    model = nn.Sequential(Counts(), Counts())
    counted = list(model)
    if execution == "shards":
        model = OffloadModel(model, "cpu", num_slices=2, checkpoint_activation=True)
    GradCache([model], 2, energy)(torch.randn(6, 8))
    assert [layer.calls for layer in counted] == [3, 3]


def test_layers_that_are_exchanged_between_steps_are_seen(assert_same_gradients: Any) -> None:
    bare, ours = layers("linear", "tanh", "linear"), layers("linear", "tanh", "linear")
    x = torch.randn(6, 8)
    step = GradCache([ours], 2, energy)
    step(x)
    for model in (bare, ours):
        model[1] = nn.ReLU()
        model.zero_grad()
    step(x)
    energy(bare(x)).backward()
    assert_same_gradients([bare], [ours])


class Exchanging(nn.Module):
    """Which of two branches is gated, and so saved, depends on a draw: the same operations, another flow of data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x), self.b(x)
        if torch.rand(()) < 0.5:
            u, v = v, u
        return nn.functional.gelu(u) + v


def test_chunks_with_other_data_flow_than_the_first_are_recomputed_as_they_ran() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Exchanging(), nn.Linear(8, 8), Exchanging(), nn.Linear(8, 4)).double()
    plain = copy.deepcopy(model)
    cache, loss = GradCache([model, model], 4, SimpleContrastiveLoss()), SimpleContrastiveLoss()
    for step in range(6):
        inputs = torch.randn(2, 32, 8, dtype=torch.float64)
        torch.manual_seed(step)
        cache(*inputs)
        torch.manual_seed(step)
        loss(*[torch.cat([plain(part) for part in each.split(4)]) for each in inputs]).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_batch_normalisation_sees_chunks_of_each_tower_s_size() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    bare = copy.deepcopy(ours)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).mean() + (a * b).mean()

    x, y = torch.randn(2, 8, 4).double()
    actual = GradCache([ours, ours], [4, 2], loss)(x, y)
    expected = loss(torch.cat([bare(part) for part in x.split(4)]), torch.cat([bare(part) for part in y.split(2)]))
    expected.backward()
    torch.testing.assert_close(actual, expected.detach())
    for p, q in zip(bare.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(bare.buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(p, q)
