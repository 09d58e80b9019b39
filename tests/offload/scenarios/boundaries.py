"""Boundaries that leave for a file and return on a lane that is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload.engine.boundaries import Boundaries
from offload.storage import DiskTier, Scratch
from offload.telemetry.statistics import Meter
from tests.late_cuda import LateCuda
from tests.offload.late import LateLane
from tests.waits import fails_with

SEEDS = range(6)


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device, and notes which streams use its memory."""

    users: list[object]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.users.append(stream)


def _boundaries(path: Path, seed: int = 0) -> tuple[Boundaries, Scratch]:
    cpu = torch.device("cpu")
    scratch = DiskTier(path, cpu).scratch()
    assert scratch is not None
    return Boundaries(scratch, LateLane(seed), Meter(cpu), 0), scratch


@fails_with("pop from empty list", "read before it was written", error=(IndexError, AssertionError))
def what_leaves_memory_comes_back(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for seed in SEEDS:
        save, load = _boundaries(path, seed)[0].hooks((0, 0))
        saved = [save(torch.full((10,), float(k))) for k in range(5)]
        for k in reversed(range(5)):
            assert (load(saved.pop()) == k).all()


@fails_with("the allocator does not know its user")
def memory_read_back_is_known_to_be_used_by_compute(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    boundaries, scratch = _boundaries(path)
    cuda, fetched, read = LateCuda(monkeypatch), list[OnDevice](), scratch.fetch  # type: ignore[attr-defined]

    def fetch(*place: Any) -> OnDevice:
        tensor = read(*place).as_subclass(OnDevice)
        tensor.users = []
        fetched.append(tensor)
        return tensor

    monkeypatch.setattr(scratch, "fetch", fetch)
    save, load = boundaries.hooks((0, 0))
    first, _ = save(torch.zeros(10)), save(torch.ones(10))
    load(first)
    assert [tensor.users for tensor in fetched] == [[cuda.compute]], "the allocator does not know its user"
