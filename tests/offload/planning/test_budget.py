"""Bytes as users write them, slots beyond two, and what an estimate counts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadModel
from offload.planning.budget import parse_bytes
from tests.offload.zoo import WIDTH, build


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (5, 5), ("5", 5), ("2GiB", 2 << 30), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("1tib", 1 << 40), ("7b", 7),
        ("2 gallons", ValueError), ("", ValueError), ("-1GiB", ValueError), (0, ValueError), (1.5, TypeError),
        (True, TypeError),
    ],
)  # fmt: skip
def test_bytes_are_read_as_people_write_them_and_what_is_none_is_named(value: Any, found: Any) -> None:
    if isinstance(found, int):
        assert parse_bytes(value) == found
    else:
        with pytest.raises(found, match="memory="):
            parse_bytes(value)


def test_an_estimate_counts_what_a_step_then_moves(tmp_path: Path) -> None:
    model = OffloadModel(
        build(["linear"] * 4), "cpu", tmp_path, num_slices=6, checkpoint_activation=True, num_microbatches=3
    )
    with pytest.raises(RuntimeError, match="run one training step first"):
        model.estimate(9)
    model(torch.randn(9, WIDTH)).sum().backward()
    before = model.statistics()
    estimate = model.estimate(9)
    assert re.search(r"\n *bytes loaded +[\d.]+ KiB\n", str(estimate))
    model(torch.randn(9, WIDTH)).sum().backward()
    after = model.statistics()
    assert estimate.bytes_loaded == after.bytes_loaded - before.bytes_loaded
    assert estimate.bytes_stored == after.bytes_stored - before.bytes_stored
    assert estimate.seconds >= estimate.compute_seconds > 0
    assert after.peak_device_bytes <= estimate.memory_bytes
