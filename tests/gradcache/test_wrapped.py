"""Towers with an OffloadModel inside: shard by shard inside it, and everything else as in the plain tower."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from offload import OffloadOptimizer
from offload.streaming.streamer import Streamer
from tests.gradcache.wrapped_towers import (
    KINDS,
    SHARDS,
    WIDTH,
    Embedding,
    Normalised,
    TwoBodies,
    assert_same,
    bodies,
    layers,
    loads,
    offloaded,
    rows,
    square,
    with_offload,
)


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "disk" else "cpu"


# --- several steps, optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_an_offload_optimizer_trains_a_wrapped_model_as_the_plain_one(update_in_backward: bool, home: Any) -> None:
    plain = Embedding()
    ours = with_offload(plain, home)
    (body,) = bodies(ours)
    own = [parameter for name, parameter in ours.named_parameters() if not name.startswith("body")]
    inner = OffloadOptimizer(body, torch.optim.SGD, lr=0.1, update_in_backward=update_in_backward)
    for model, optimizers in (
        (plain, [torch.optim.SGD(plain.parameters(), lr=0.1)]),
        (ours, [inner, torch.optim.SGD(own, lr=0.1)]),
    ):
        for seed in (3, 4, 5):
            GradCache([model], 2, square)(rows(6, seed))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for (name, expected), (_, actual) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13, msg=name)


@pytest.mark.parametrize("kind", ["embedding", "two bodies"])
def test_updates_that_are_pending_run_beside_the_next_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step asks which modules and parameters a tower has; it reads no values before a shard is loaded."""
    plain = KINDS[kind]()
    ours = with_offload(plain, tmp_path)
    optimizers = [OffloadOptimizer(body, torch.optim.SGD, lr=0.1) for body in bodies(ours)]
    inside = [part for part in plain.children() if isinstance(part, nn.Sequential)]
    reference = torch.optim.SGD([p for part in inside for p in part.parameters()], 0.1)
    shards = [shard for body in bodies(ours) for shard in body._homes.shards]
    finished: list[int] = []
    for step in range(3):
        GradCache([plain], 2, square)(rows(6, step))
        with monkeypatch.context() as patch:
            patch.setattr(Streamer, "apply_pending_updates", lambda self: finished.append(1))
            GradCache([ours], 2, square)(rows(6, step))
        assert finished == []
        for optimizer in (reference, *optimizers):
            optimizer.step()
        assert all(shard.pending is not None for shard in shards)
        for optimizer in (reference, *optimizers):
            optimizer.zero_grad()
    assert_same(plain, ours)


# --- evaluation, frozen parts --------------------------------------------------------------------------------------


def test_evaluation_and_a_frozen_tower_load_each_shard_once_and_write_no_gradient() -> None:
    plain = Embedding().eval()
    ours, frozen = with_offload(plain), with_offload(Normalised()).requires_grad_(False)
    with torch.no_grad():
        expected = square(plain(rows(6)))
        loss = GradCache([ours], 2, square)(rows(6))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    assert max(loads(ours)) == SHARDS
    assert all(parameter.grad is None for parameter in ours.parameters())
    GradCache([with_offload(Normalised()), frozen], 2, square)(rows(6), rows(6, 4))
    assert max(loads(frozen)) == SHARDS


def test_a_frozen_body_passes_gradients_to_what_is_trained_before_it() -> None:
    plain = Embedding()
    plain.body.requires_grad_(False)
    ours = with_offload(plain)
    for model in (plain, ours):
        GradCache([model], 2, square)(rows(6))
    assert_same(plain, ours)
    assert plain.first.weight.grad is not None
    assert max(loads(ours)) <= 2 * SHARDS


# --- who shares what -----------------------------------------------------------------------------------------------


def test_different_towers_around_one_model_share_its_visits(home: Any) -> None:
    class Around(nn.Module):
        def __init__(self, body: nn.Module, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.body, self.last = body, nn.Linear(WIDTH, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x))

    bare = layers()
    body = offloaded(copy.deepcopy(bare), home if home == "cpu" else home / "body")
    plain: list[nn.Module] = [Around(bare, 1), Around(bare, 2), bare]
    ours: list[nn.Module] = [Around(body, 1), Around(body, 2), body]
    inputs = [rows(6), rows(5, 4), rows(7, 5)]
    before = body.statistics().shard_loads

    def loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return square(a, b) + square(c) + a.sum() * c.mean()

    GradCache(plain, 2, loss)(*inputs)
    GradCache(ours, 2, loss)(*inputs)
    assert body.statistics().shard_loads - before <= 2 * SHARDS
    for expected, actual in zip(plain[:2], ours[:2], strict=True):
        assert_same(expected, actual)


def test_a_model_waits_for_the_chunks_of_a_tower_that_calls_another_one_first() -> None:
    both = TwoBodies()
    ours = with_offload(both)
    inputs = [rows(4), rows(12, 4)]
    for model in (both, ours):
        GradCache([model, nn.Sequential(model.second, nn.Identity())], 2, square)(*inputs)
    assert_same(both, ours)
    assert max(loads(ours)) <= 2 * SHARDS


def test_micro_batches_of_the_model_stay_micro_batches() -> None:
    """Batch normalisation inside the body sees the rows that it sees in the model's own forward."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))).double()
    ours = with_offload(plain, num_slices=2, num_microbatches=2)
    square(torch.cat([plain(part) for part in rows(16).split(4)])).backward()
    GradCache([ours], 8, square)(rows(16))
    assert_same(plain, ours)
