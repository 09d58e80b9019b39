"""An OffloadOptimizer trains like the plain optimizer after clip_grad_norm_, whatever the loop does in between."""

from __future__ import annotations

import tempfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload.optim.update_blocks
from tests.offload.pair import CLASSES, Pair

ACTIONS = [
    *("backward", "backward", "accumulate", "step", "step", "skip"),
    *("zero", "zero in place", "model.zero", "eval", "schedule", "look"),
]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CLASSES)),
    max_norm=st.sampled_from([None, 0.2, 1e3]),
    on_disk=st.booleans(),
    tied=st.booleans(),
    grouped=st.booleans(),
    slices=st.integers(1, 6),
    update_block_bytes=st.sampled_from([64, 300, 16 << 20]),
    recompute=st.booleans(),
    half=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=14),
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_any_sequence_trains_like_the_plain_optimizer(
    name: str,
    max_norm: float | None,
    on_disk: bool,
    tied: bool,
    grouped: bool,
    slices: int,
    update_block_bytes: int,
    recompute: bool,
    half: bool,
    actions: list[str],
) -> None:
    # A digit that an update rounds in another way than the plain one becomes a difference of 16-bit numbers, so both
    # must be exact. And a tied parameter is cast once in the bare model, whose gradient is then summed in 16 bits.
    half = half and name in ("sgd", "momentum") and max_norm is None and not tied
    if name in ("adafactor", "asgd", "sgd", "adagrad") and grouped:
        grouped = False  # they take no weight_decay of this form, or need none
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", update_block_bytes)
        home = folder if on_disk else "cpu"
        pair = Pair(
            name,
            home,
            max_norm=max_norm,
            tied=tied,
            grouped=grouped,
            slices=slices,
            recompute=recompute,
            param_dtype=torch.bfloat16 if half else None,
        )
        for action in ["backward", "step", *actions]:
            pair.do(action)
        pair.assert_equal()
        pair.assert_equal_states()
