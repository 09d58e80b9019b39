"""Boundaries that leave and return on a lane that is late, and a place that says when it is used wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload.engine.boundary_store import SpillingStore

from offload.core.boundaries import Boundaries
from offload.planning.residency import WRITES_IN_FLIGHT
from offload.telemetry.statistics import Meter
from tests.late_cuda import LateCuda
from tests.offload.engine.test_boundary_store import Shelf, value
from tests.offload.late import LateLane
from tests.waits import fails_with

SEEDS = range(6)


class Strict(Shelf):
    """Refuses to be used after it was closed."""

    def store(self, tensor: torch.Tensor) -> object:
        assert not self.closed
        return super().store(tensor)


def _store(seed: int = 0) -> tuple[SpillingStore, Strict, LateLane]:
    shelf, lane = Strict(), LateLane(seed)
    return SpillingStore(shelf, lane, Meter(torch.device("cpu"))), shelf, lane


@fails_with("`leaves` has length 0", error=ValueError)
def every_use_sees_its_value(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for seed in SEEDS:
        boundaries, _, _ = _store(seed)
        for k in range(5):
            boundaries.put((1, k), value(k))
            boundaries.spill((1, k))
        boundaries.prefetch((1, 4))
        for k in reversed(range(5)):
            if k:
                boundaries.prefetch((1, k - 1))
            assert (boundaries.get((1, k))[0] == k).all()
            boundaries.drop((1, k))
        boundaries.close()


@fails_with("a boundary was released before its last use")
def room_is_given_away_after_its_last_use(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    boundaries, shelf, lane = _store()
    boundaries.put((1, 0), value(0))
    boundaries.spill((1, 0))
    boundaries.prefetch((1, 0))
    boundaries.drop((1, 0))
    spill, fetch, release = lane.pending
    release.run()  # the adversary has it run as early as it may
    lane.close()
    assert [arrival.error for arrival in (spill, fetch, release)] == [None] * 3, (
        "a boundary was released before its last use"
    )
    assert shelf.rest == {}, "a boundary was released before its last use"


@fails_with("a boundary was stored after the close")
def nothing_is_under_way_in_a_place_that_was_closed(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    boundaries, shelf, lane = _store()
    boundaries.put((1, 0), value(0))
    boundaries.spill((1, 0))
    (spill,) = lane.pending
    boundaries.close()
    assert shelf.closed
    lane.close()
    assert spill.error is None, "a boundary was stored after the close"


@fails_with("too many boundaries are on their way")
def few_boundaries_are_on_their_way_out(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Each of them keeps its memory, which the budget knows of."""
    boundaries, _, lane = _store()
    for k in range(8):
        boundaries.put((1, k), value(k))
        boundaries.spill((1, k))
        assert len(lane.pending) <= WRITES_IN_FLIGHT, "too many boundaries are on their way"
    boundaries.close()


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device, and notes which streams use its memory."""

    users: list[object]
    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.users.append(stream)


@fails_with("the allocator does not know its user")
def memory_made_on_the_lane_is_known_to_be_used_by_compute(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Without this its memory is reused on the lane's stream while layers read it."""
    cuda = LateCuda(monkeypatch)
    boundaries, shelf, _ = _store()
    fetched: list[OnDevice] = []

    def fetch(ticket: int) -> OnDevice:
        tensor = shelf.rest[ticket].clone().as_subclass(OnDevice)
        tensor.users = []
        fetched.append(tensor)
        return tensor

    monkeypatch.setattr(shelf, "fetch", fetch)
    boundaries.put((1, 0), value(0))
    boundaries.spill((1, 0))
    boundaries.prefetch((1, 0))
    boundaries.get((1, 0))
    assert [tensor.users for tensor in fetched] == [[cuda.compute]], "the allocator does not know its user"
    boundaries.close()


def _boundaries(seed: int = 0) -> tuple[Boundaries, Strict]:
    shelf = Strict()
    return Boundaries(shelf, LateLane(seed), Meter(torch.device("cpu")), 0), shelf


@fails_with("list index out of range", error=IndexError)
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
