"""Updates are a part of the plan: printed, counted and predicted like loads."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.planning.plan import Kind
from offload.telemetry.statistics import UPDATE_IN_MEMORY
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


def test_the_plan_shows_updates_in_backward() -> None:
    model, optimizer = make("cpu", update_in_backward=True)
    plan = model.plan()
    assert str(plan).endswith("B3.0 D3 V3 E3 L1 B2.0 D2 V2 E2 L0 B1.0 D1 V1 B0.0 D0 V0")
    validate(plan)
    assert optimizer.update_in_backward


def test_frozen_shards_are_not_updated_in_the_plan() -> None:
    bare = build(["linear", "linear"])
    for parameter in bare[1].parameters():
        parameter.requires_grad_(False)
    model = OffloadModel(bare, "cpu", num_slices=4, checkpoint_activation=False)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    assert optimizer.updated_shards == {0, 2, 3}
    assert [a.shard for a in model.plan().actions if a.kind is Kind.UPDATE] == [0, 2, 3]


@pytest.mark.parametrize("in_backward", [False, True])
def test_updates_run_in_the_order_of_the_plan(home: str, tmp_path: Path, in_backward: bool) -> None:
    model, optimizer = make(home, update_in_backward=in_backward)
    step(model, optimizer)
    with model.trace(tmp_path / "trace.json") as events:
        step(model, optimizer)
        optimizer.synchronize()
    kind = Kind.UPDATE_IN_BACKWARD if in_backward else Kind.UPDATE
    expected = [f"{kind.value}{j}" for j in (range(3, -1, -1) if in_backward else range(4))]
    ran = [event.token for event in sorted(events, key=lambda e: e.begin) if event.track == "update lane"]
    # In host memory, updates begin at once at step(), so this trace also holds those that its own step decided.
    assert ran[-4:] == expected


def test_an_estimate_includes_updates(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(home)
    step(model, optimizer)
    step(model, optimizer)
    optimizer.synchronize()
    with_updates = model.estimate(2).seconds
    each = model._homes.meter.copy_seconds_per_byte
    kind = "update" if model._homes.shards[0].blocking_io else UPDATE_IN_MEMORY
    assert each(kind) > 0
    monkeypatch.setattr(
        model._homes.meter, "copy_seconds_per_byte", lambda lane: each(lane) * (10**6 if lane == kind else 1)
    )
    assert model.estimate(2).seconds > with_updates


def test_a_step_moves_the_bytes_that_the_documentation_says(tmp_path: Path) -> None:
    """20 bytes are read and 16 written for each parameter that is trained with Adam and a global norm."""
    model, optimizer = make(f"{tmp_path}/", max_norm=0.1)
    step(model, optimizer)
    step(model, optimizer)
    before = model.statistics()
    step(model, optimizer)
    after = model.statistics()
    optimizer.synchronize()
    count = sum(p.numel() for p in model.parameters())
    cached = sum(p.numel() for p in [*model.get_submodule("2").parameters(), *model.get_submodule("3").parameters()])
    moved = {
        "loaded": after.bytes_loaded - before.bytes_loaded,
        "stored": after.bytes_stored - before.bytes_stored,
        "read": after.update_bytes_read - before.update_bytes_read,
        "written": after.update_bytes_written - before.update_bytes_written,
    }
    # What is still in a slot when backward begins is not loaded again.
    assert moved == {"loaded": 8 * count - 4 * cached, "stored": 4 * count, "read": 12 * count, "written": 12 * count}
    assert after.shard_updates - before.shard_updates == 4


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


def test_an_update_in_host_memory_moves_no_bytes() -> None:
    model, optimizer = make("cpu")
    step(model, optimizer)
    optimizer.synchronize()
    assert model.statistics().shard_updates == 4
    assert model.statistics().update_bytes_read == model.statistics().update_bytes_written == 0
