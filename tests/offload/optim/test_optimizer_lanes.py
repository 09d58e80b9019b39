"""Updates run beside compute in any order, and each wait for them is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.optim.disk_update import DiskParamBlock
from offload.optim.update import Update
from offload.streaming.lane import Arrival
from offload.streaming.shard import Shard
from offload.streaming.streamer import Streamer
from tests.offload.late import LateLane
from tests.offload.pair import Pair
from tests.offload.prompt import PromptLane

Late = Callable[..., list[LateLane]]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> Callable[[LateLane], LateLane]:
    """Optimizers made after calling this run their updates on the given lane."""

    def install(lane: LateLane) -> LateLane:
        monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: lane)
        return lane

    return install


class Done(Arrival):
    def wait(self) -> None: ...

    synchronize = run = wait


DONE = Done()


def same(pair: Pair, steps: int = 3) -> bool:
    """Trains, with an eval forward in between; whether both came to the same."""
    try:
        for step in range(steps):
            pair.do("backward")
            if step == 1:
                pair.do("backward")
            for action in ("step", "schedule", "zero", "eval") if step == 1 else ("step", "zero"):
                pair.do(action)
        pair.assert_equal()
        pair.assert_equal_states()
    except AssertionError:
        return False
    return True


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    slices=st.integers(1, 6),
    tied=st.booleans(),
    max_norm=st.sampled_from([None, 0.1]),
    in_backward=st.booleans(),
)
def test_training_is_exact_in_whatever_order_updates_and_copies_finish(
    home: str,
    late: Late,
    updates: Callable[[LateLane], LateLane],
    seed: int,
    slices: int,
    tied: bool,
    max_norm: float | None,
    in_backward: bool,
) -> None:
    late(seed)
    updates(LateLane(seed + 7))
    if in_backward:
        pair = Pair("adamw", home, tied=tied, slices=slices, update_in_backward=True)
        for _ in range(3):
            for action in ("backward", "step", "zero"):
                pair.do(action)
        pair.assert_equal()
    else:
        assert same(Pair("adamw", home, tied=tied, slices=slices, max_norm=max_norm))


def test_a_load_waits_for_the_update_of_its_home(home: str, updates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    updates(LateLane(1))
    assert same(Pair("momentum", home))

    original = Shard.fill
    monkeypatch.setattr(Update, "filled", lambda self, slot: False)
    monkeypatch.setattr(Update, "start", lambda self, slot=None, after=(): DONE)
    monkeypatch.setattr(Shard, "fill", lambda self, slot, update=None: original(self, slot, None))
    assert not same(Pair("momentum", home), steps=2)


def test_a_load_of_a_tied_layer_waits_for_the_update_of_the_owner(
    tmp_path: Path, updates: Any, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borrower's slot is filled from the owner's home, which has an update of its own."""

    def train_with_every_adversary() -> None:
        for seed in range(6):
            late(seed)
            updates(LateLane(seed))
            pair = Pair("sgd", f"{tmp_path}/", tied=True, kinds=("linear",), slices=2)
            for action in ("backward", "step", "zero"):
                pair.do(action)
            pair.eval()

    train_with_every_adversary()
    start = Update.start
    # Only the load of the owner itself gives a slot.
    monkeypatch.setattr(
        Update, "start", lambda self, slot=None, after=(): start(self, slot) if slot is not None else DONE
    )
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        train_with_every_adversary()


def test_reading_through_the_model_waits_for_updates(home: str, updates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    updates(LateLane(0, forgets="U"))
    pair = Pair("sgd", home)
    pair.backward()
    pair.step()
    pair.zero()
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        pair.assert_equal()
    updates(LateLane(0))
    pair = Pair("sgd", home)
    pair.backward()
    pair.step()
    monkeypatch.setattr(Streamer, "apply_pending_updates", lambda self: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not"):
        pair.assert_equal()


def test_updates_follow_the_order_of_loads_and_stay_ahead_by_the_slots(tmp_path: Path, updates: Any) -> None:
    """A home on disk is updated in the slot that it is about to fill: just before its load, not all at once."""
    lane = updates(PromptLane())
    pair = Pair("adamw", f"{tmp_path}/")
    pair.backward()
    pair.step()
    pair.zero()
    assert lane.log == []
    seen: list[list[str]] = []
    for layer in pair.model.children():
        layer.register_forward_pre_hook(lambda *_: seen.append(list(lane.log)))
    pair.eval()
    assert seen[0] == ["U0", "U1"]
    assert seen[-1] == ["U0", "U1", "U2", "U3"]


def test_a_disk_home_is_read_once_for_update_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.storage.disk import DiskBlock

    pair = Pair("adamw", f"{tmp_path}/")
    for action in ("backward", "step", "zero", "backward", "step", "zero"):
        pair.do(action)
    moved: dict[tuple[str, DiskBlock], torch.Tensor] = {}  # how often each byte of a block was read, and written
    read, write = DiskBlock.read_into, DiskBlock.write

    def times(what: str, block: Any) -> torch.Tensor:
        return moved.setdefault((what, block), torch.zeros(block.nbytes, dtype=torch.int))

    def counted_read(self: DiskBlock, destination: torch.Tensor, offset: int = 0) -> None:
        times("read", self)[offset : offset + destination.numel()] += 1
        read(self, destination, offset)

    def counted_write(self: DiskBlock, source: torch.Tensor, offset: int) -> None:
        times("write", self)[offset : offset + source.numel()] += 1
        write(self, source, offset)

    monkeypatch.setattr(DiskBlock, "read_into", counted_read)
    monkeypatch.setattr(DiskBlock, "write", counted_write)
    pair.eval()
    names = {id(parameter): name for name, parameter in pair.model.named_parameters()}
    for shard, param_blocks in pair.ours.param_blocks.items():
        assert (times("read", shard.home) == 1).all()  # weights in whole shards, for the update and for the layers
        for param_block in param_blocks:
            assert isinstance(param_block, DiskParamBlock)
            for s in param_block.slices:
                trained = int("never" not in names[id(s.parameter)])
                here = slice(s.offset, s.offset + s.nbytes)
                assert (times("write", shard.home)[here] == trained).all()
                if trained:
                    (region,) = shard.gradient_regions
                    begin = region.offsets[id(s.parameter)]
                    assert (times("read", region.block)[begin : begin + s.nbytes] == 1).all()
            for rest in param_block.state_files.places.values():  # the moments
                here = slice(rest.offset, rest.offset + rest.nbytes)
                assert (times("read", rest.block)[here] == 1).all()
                assert (times("write", rest.block)[here] == 1).all()
        assert not any(("write", region.block) in moved for region in shard.gradient_regions)
    assert all(int(count.max()) <= 1 for count in moved.values())  # nor any padding twice


def test_updates_appear_in_the_trace_beside_compute(home: str, tmp_path: Path) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    with pair.model.trace(tmp_path / "trace.json") as events:
        pair.step()
        pair.zero()
        pair.eval()
    assert sorted(event.token for event in events if event.track == "update lane") == ["U0", "U1", "U2", "U3"]
