"""Test doubles and models that the offload tests share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.lane import Lanes
from offload.shard import Shard
from offload.tier.cache import _direct_works
from tests.offload.late import LateLane


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[LateLane]]:
    """Models made after calling this move their bytes on late lanes, and every slot holds NaN until it is filled."""

    def install(seed: int = 0, **mutations: object) -> list[LateLane]:
        made: list[LateLane] = []

        def open_late_lanes(device: object, *, blocking_io: bool) -> Lanes:
            lanes = [LateLane(seed + k, **mutations) for k in range(3)]
            made.extend(lanes)
            return Lanes(*lanes)

        monkeypatch.setattr("offload.model.open_lanes", open_late_lanes)
        load = Shard.load

        def poisoned_load(self: Shard, slot: object) -> None:
            slot.fill_(255)  # type: ignore[attr-defined] - every float made of these bytes is NaN
            load(self, slot)  # type: ignore[arg-type]

        monkeypatch.setattr(Shard, "load", poisoned_load)
        return made

    return install


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """Both kinds of home, as ``offload_device``."""
    return "cpu" if request.param == "host" else str(tmp_path) + os.sep


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A directory whose files can be read and written past the page cache."""
    if not _direct_works(tmp_path):
        pytest.skip("needs a temporary directory on a file system with direct transfers (O_DIRECT)")
    return tmp_path
