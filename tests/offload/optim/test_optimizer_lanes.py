"""Updates run beside compute in any order, and each wait for them is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
