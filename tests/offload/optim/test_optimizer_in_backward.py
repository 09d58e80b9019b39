"""With update_in_backward a shard is updated while backward goes on; what would make that wrong is refused."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from pipe.recompute.phase import is_recomputing
from tests.offload.pair import CLASSES, Pair
from tests.offload.parameters_outside import ActNorm
from tests.offload.zoo import WIDTH


def accumulated(pair: Pair) -> None:
    with pair.ours.accumulate():
        pair.backward()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CLASSES)),
    tied=st.booleans(),
    slices=st.integers(1, 6),
    recompute=st.booleans(),
    backwards=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_it_trains_like_the_plain_optimizer(
    home: str, name: str, tied: bool, slices: int, recompute: bool, backwards: list[int]
) -> None:
    pair = Pair(name, home, tied=tied, slices=slices, recompute=recompute, update_in_backward=True)
    for count in backwards:
        for _ in range(count - 1):
            accumulated(pair)
        for action in ("backward", "step", "zero", "schedule"):
            pair.do(action)
    pair.assert_equal()
    pair.assert_equal_states()


def test_no_gradient_is_stored_and_shards_are_updated_before_backward_ends(tmp_path: Any) -> None:
    pair = Pair("adamw", f"{tmp_path}/", update_in_backward=True)
    order: list[str] = []
    shards = pair.model._homes.shards
    original = pair.ours.in_backward.complete  # type: ignore[union-attr]

    def complete(shard: Any, kept: Any, slot: Any, after: Any) -> Any:
        order.append(f"U{shard.index}")
        arrival = original(shard, kept, slot, after)
        assert all(p.grad is None for p in shard.parameters)
        return arrival

    pair.ours.in_backward.complete = complete  # type: ignore[union-attr, method-assign]
    first = next(iter(pair.model.children()))
    first.register_forward_pre_hook(lambda *_: order.append("B0") if is_recomputing() else None)
    pair.backward()
    assert order == ["U3", "U2", "U1", "B0", "U0"]
    assert not any(shard.gradient_regions for shard in shards)
    pair.step()
    pair.zero()
    pair.assert_equal()


def test_a_second_backward_without_accumulate_is_refused_and_changes_nothing(home: str) -> None:
    pair = Pair("sgd", home, update_in_backward=True)
    pair.backward()
    before = [p.detach().clone() for p in pair.model.parameters()]
    loss = pair.model(pair.batch()).sum()
    with pytest.raises(RuntimeError, match="a second backward before step"):
        loss.backward()
    del loss
    pair.step()
    pair.zero()
    pair.assert_equal()
    for then, now in zip(before, pair.model.parameters(), strict=True):
        assert torch.equal(then, now)
    for action in ("backward", "step", "zero"):
        pair.do(action)
    pair.assert_equal()


def test_two_forwards_in_one_backward_are_refused_before_anything_changes(home: str) -> None:
    pair = Pair("sgd", home, update_in_backward=True)
    x = pair.batch()
    loss = pair.model(x).sum() + pair.model(x).sum()
    with pytest.raises(RuntimeError, match="more forwards of this model still need"):
        loss.backward()
    del loss
    gc.collect()
    pair.assert_equal()
    pair.backward()
    pair.step()
    pair.zero()
    pair.assert_equal()


def test_a_backward_that_fails_half_way_leaves_an_optimizer_that_says_so(home: str) -> None:
    pair = Pair("sgd", home, update_in_backward=True)
    handle = next(iter(pair.model.children())).register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = pair.model(pair.batch()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    loss = pair.model(pair.batch()).sum()
    with pytest.raises(RuntimeError, match=r"updated the shards \[3, 2, 1\]"):
        loss.backward()
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        pair.ours.step()


@pytest.mark.parametrize("repeat", range(20))
def test_an_update_in_backward_waits_for_the_load_of_a_shard_whose_backward_needs_no_weights(
    tmp_path: Path, repeat: int
) -> None:
    """Nothing else waits for it: the gradient of ``x + shift`` needs none. A thread loads, so it is tried often."""
    bare = nn.Sequential(ActNorm(WIDTH), nn.Linear(WIDTH, WIDTH), ActNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model = OffloadModel(
        copy.deepcopy(bare), "cpu", tmp_path, 4, True, memory=MemoryPolicy.fixed(slots=3, graph_bytes=1 << 20)
    )
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        for run, optimizer in ((model, ours), (bare, plain)):
            run(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), bare.parameters(), strict=True))
