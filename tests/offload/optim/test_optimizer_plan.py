"""Updates are a part of the plan: printed, counted and predicted like loads."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.planning.plan import Kind
from tests.offload.pair import Pair
from tests.offload.planning.proof import validate
from tests.offload.zoo import WIDTH, build


def make(home: str, **more: Any) -> tuple[OffloadModel, OffloadOptimizer]:
    model = OffloadModel(build(["linear", "linear"]), "cpu", home, num_slices=4, checkpoint_activation=True)
    return model, OffloadOptimizer(model, torch.optim.AdamW, **more)


def step(model: OffloadModel, optimizer: OffloadOptimizer) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_plan_shows_the_updates_of_an_optimizer_as_long_as_there_is_one() -> None:
    model, optimizer = make("cpu", max_norm=1.0)
    plan = model.plan()
    assert str(plan).startswith("U0 L0 U1 L1 F0.0 E0 U2 L2 F1.0")
    assert plan.clips
    assert plan.pending == frozenset(range(4))
    validate(plan)
    del optimizer
    gc.collect()
    assert str(model.plan()).startswith("L0 L1 F0.0 E0 L2")


@pytest.mark.parametrize("in_backward", [False, True])
def test_updates_run_in_the_order_of_the_plan(home: str, tmp_path: Path, in_backward: bool) -> None:
    model, optimizer = make(home, update_in_backward=in_backward)
    step(model, optimizer)
    with model.trace(tmp_path / "trace.json") as events:
        step(model, optimizer)
        optimizer.synchronize()
    kind = Kind.UPDATE_IN_BACKWARD if in_backward else Kind.UPDATE
    updates = model._homes.streamer.gradient_offload.optimizers.planned()
    expected = [
        str(action)
        for action in model._homes.steps.plan([2], updates, slots=2, training=True).actions
        if action.kind is kind
    ]
    ran = [event.token for event in sorted(events, key=lambda e: e.begin) if event.track == "update lane"]
    # In host memory, updates begin at once at step(), so this trace also holds those that its own step decided.
    assert ran[-4:] == expected


@pytest.mark.parametrize("slots", [2, 3])
def test_an_update_in_backward_reads_no_weights_that_are_in_a_slot(tmp_path: Path, slots: int) -> None:
    """16 bytes are read and 12 written for each parameter, less what slots keep between the passes."""
    policy = MemoryPolicy.fixed(slots=slots)
    pair = Pair("adamw", f"{tmp_path}/", kinds=("linear", "linear"), memory=policy, update_in_backward=True)
    for _ in range(2):
        for action in ("backward", "step", "zero"):
            pair.do(action)
    before = pair.model.statistics()
    for action in ("backward", "step", "zero"):
        pair.do(action)
    after = pair.model.statistics()
    count = sum(p.numel() for p in pair.model.parameters())
    shards = pair.model._homes.shards
    cached = sum(s.parameter.numel() for shard in shards[-slots:] for s in shard.own)
    assert after.bytes_moved - before.bytes_moved == 28 * count - 4 * cached
    assert after.update_bytes_read - before.update_bytes_read == 8 * count
    pair.assert_equal()
    pair.assert_equal_states()


@pytest.mark.parametrize("waiting", [2, 4])
def test_gradients_that_wait_in_memory_are_neither_written_nor_read(tmp_path: Path, waiting: int) -> None:
    shard_bytes = (WIDTH * WIDTH + WIDTH) * 4
    pair = Pair(
        "adamw", f"{tmp_path}/", kinds=("linear", "linear"), max_norm=0.1, gradient_bytes=waiting * shard_bytes + 3
    )
    for action in ("backward", "step", "zero", "backward", "backward", "step", "zero"):
        pair.do(action)
    pair.ours.synchronize()
    before = pair.model.statistics()
    for action in ("backward", "step", "look", "zero"):
        pair.do(action)
    after = pair.model.statistics()
    assert after.bytes_stored - before.bytes_stored == (4 - waiting) * shard_bytes
    # Nothing loads these updates' weights: those are read for the update itself.
    assert after.update_bytes_read - before.update_bytes_read == 4 * 3 * shard_bytes + (4 - waiting) * shard_bytes
    regions = [shard.gradient_regions for shard in pair.model._homes.shards]
    assert [not region for region in regions] == [j < waiting for j in range(4)]
    pair.assert_equal_states()
