"""Boundaries that leave and return on a lane that is late, and a place that says when it is used wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.engine.boundaries import Boundaries
from offload.storage import Scratch
from offload.telemetry.statistics import Meter
from tests.late_cuda import LateCuda
from tests.offload.late import LateLane
from tests.waits import fails_with

SEEDS = range(6)


class Shelf(Scratch):
    """Scratch space in a dict, which refuses to be used after it was closed."""

    name = "shelf"

    def __init__(self) -> None:
        self.rest: dict[int, torch.Tensor] = {}
        self.stored: list[float] = []
        self.closed = False

    def store(self, tensor: torch.Tensor) -> object:
        assert not self.closed
        self.rest[len(self.stored)] = tensor.clone()
        self.stored.append(float(tensor.flatten()[0]))
        return len(self.stored) - 1

    def fetch(self, ticket: object) -> torch.Tensor:
        return self.rest[ticket].clone()  # type: ignore[index]

    def release(self, ticket: object) -> None:
        del self.rest[ticket]  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device, and notes which streams use its memory."""

    users: list[object]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.users.append(stream)


def _boundaries(seed: int = 0) -> tuple[Boundaries, Shelf]:
    shelf = Shelf()
    return Boundaries(shelf, LateLane(seed), Meter(torch.device("cpu")), 0), shelf


@fails_with("missing 1 required positional argument: 'part'", error=TypeError)
def what_leaves_memory_comes_back(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for seed in SEEDS:
        save, load = _boundaries(seed)[0].hooks((0, 0))
        saved = [save(torch.full((10,), float(k))) for k in range(5)]
        for k in reversed(range(5)):
            assert (load(saved.pop()) == k).all()


@fails_with("the allocator does not know its user")
def memory_read_back_is_known_to_be_used_by_compute(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda = LateCuda(monkeypatch)
    boundaries, shelf = _boundaries()
    fetched: list[OnDevice] = []

    def fetch(ticket: int) -> OnDevice:
        tensor = shelf.rest[ticket].clone().as_subclass(OnDevice)
        tensor.users = []
        fetched.append(tensor)
        return tensor

    monkeypatch.setattr(shelf, "fetch", fetch)
    save, load = boundaries.hooks((0, 0))
    first, _ = save(torch.zeros(10)), save(torch.ones(10))
    load(first)
    assert [tensor.users for tensor in fetched] == [[cuda.compute]], "the allocator does not know its user"
