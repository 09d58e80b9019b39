"""Boundaries stay on the device as far as the budget allows; the one needed last leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.engine.boundary_store import WRITES_IN_FLIGHT, BoundaryStore
from offload.storage import Scratch
from offload.telemetry.statistics import Meter
from tests.offload.late import LateLane

CPU = torch.device("cpu")
BYTES = 40


class Shelf(Scratch):
    """Scratch space in a dict, which counts."""

    name = "shelf"

    def __init__(self) -> None:
        self.rest: dict[int, torch.Tensor] = {}
        self.stored: list[float] = []
        self.closed = False

    def store(self, tensor: torch.Tensor) -> object:
        self.rest[len(self.stored)] = tensor.clone()
        self.stored.append(float(tensor.flatten()[0]))
        return len(self.stored) - 1

    def fetch(self, ticket: object) -> torch.Tensor:
        return self.rest[ticket].clone()  # type: ignore[index]

    def release(self, ticket: object) -> None:
        del self.rest[ticket]  # type: ignore[arg-type]

    def close(self) -> None:
        self.closed = True


def value(k: int) -> tuple[torch.Tensor, None]:
    return torch.full((10,), float(k)), None


#: Boundaries in motion: one in use, one coming, and those on their way out.
MOVING = 2 + WRITES_IN_FLIGHT


def store(boxes: int, shelf: Scratch | None = None, seed: int = 0) -> tuple[BoundaryStore, Meter]:
    """A store in which ``boxes`` boundaries may rest."""
    meter = Meter(CPU)
    return BoundaryStore(shelf, LateLane(seed), (boxes + MOVING) * BYTES, meter), meter


def test_within_the_budget_no_boundary_is_spilled() -> None:
    shelf = Shelf()
    boundaries, meter = store(3, shelf)
    for k in range(3):
        boundaries.put(k, value(k), [k])
    assert [float(boundaries.get(k, k)[0][0]) for k in range(3)] == [0, 1, 2]
    assert shelf.stored == []
    assert meter.bytes_spilled == 0


def test_the_boundary_needed_last_is_spilled() -> None:
    shelf = Shelf()
    boundaries, _ = store(2, shelf)
    for k, use in ((0, 5), (1, 9), (2, 7)):
        boundaries.put(k, value(k), [use])
    boundaries.close()
    assert shelf.stored == [1.0]


def test_a_value_is_written_once_however_often_it_returns() -> None:
    shelf = Shelf()
    boundaries, _ = store(1, shelf)
    boundaries.put("a", value(1), [1, 4, 9])
    boundaries.put("b", value(2), [2, 3, 8])
    for now, key in ((1, "a"), (2, "b"), (3, "b"), (4, "a"), (8, "b"), (9, "a")):
        assert float(boundaries.get(key, now)[0][0]) == {"a": 1, "b": 2}[key]
    boundaries.close()
    assert sorted(shelf.stored) == sorted(set(shelf.stored))


@given(
    budget=st.integers(0, 6),
    seed=st.integers(0, 99),
    passes=st.lists(st.permutations(range(5)), min_size=1, max_size=4),
    ahead=st.booleans(),
)
def test_every_use_sees_its_value_and_the_budget_holds(
    budget: int, seed: int, passes: Sequence[Sequence[int]], ahead: bool
) -> None:
    shelf = Shelf()
    boundaries, meter = store(budget, shelf, seed)
    order = [key for one in passes for key in one]
    for key in range(5):
        boundaries.put(key, value(key), [now for now, k in enumerate(order) if k == key])
    for now, key in enumerate(order):
        tensor, nothing = boundaries.get(key, now)
        assert nothing is None
        assert (tensor == key).all()
        if ahead and now + 1 < len(order):
            boundaries.prefetch(order[now + 1])
        assert meter.held_bytes <= (budget + MOVING) * BYTES
    for key in range(5):
        boundaries.drop(key)
    boundaries.close()
    assert meter.held_bytes == 0
    assert shelf.rest == {}
    assert shelf.closed


def test_a_value_changed_in_place_is_not_used() -> None:
    boundaries, _ = store(3)
    x = torch.zeros(3)
    boundaries.put((2, 0), x, [1])
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"enters shard \(2, 0\) was changed in place"):
        boundaries.get((2, 0), 1)


def test_a_store_that_is_dropped_gives_its_bytes_back() -> None:
    boundaries, meter = store(1, Shelf())
    for k in range(4):
        boundaries.put(k, value(k), [k])
    assert meter.held_bytes > 0
    del boundaries
    assert meter.held_bytes == 0


def test_an_alias_counts_once() -> None:
    boundaries, meter = store(9)
    x = torch.zeros(10)
    boundaries.put(0, (x, x.view(2, 5)), [0])
    assert meter.held_bytes == BYTES
