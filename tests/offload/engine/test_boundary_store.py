"""Boundaries stay on the device as far as the budget allows; the one needed last leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload.engine.boundary_store import SpillingStore

from offload.planning.plan import Action, Kind
from offload.planning.residency import MOVING, Residency
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


class Planned:
    """A store that does what its plan says, for keys (1, k)."""

    def __init__(self, boxes: int, shelf: Scratch | None = None, seed: int = 0) -> None:
        """``boxes`` boundaries may stay in memory besides those that move."""
        self.meter = Meter(CPU)
        self.store = SpillingStore(shelf, LateLane(seed), self.meter)
        self.residency = Residency((boxes + MOVING) * BYTES)

    def put(self, k: int, uses: Sequence[int]) -> None:
        nbytes = self.store.put((1, k), value(k))
        self._do(self.residency.put((1, k), nbytes, uses))

    def use(self, k: int, now: int) -> float:
        self._do(self.residency.use((1, k), now))
        tensor, nothing = self.store.get((1, k))
        assert nothing is None
        assert (tensor == k).all()
        return float(tensor[0])

    def end_use(self, k: int) -> None:
        self._do(self.residency.end_use((1, k)))

    def prefetch(self, k: int) -> None:
        self._do(self.residency.prefetch((1, k)))

    def _do(self, actions: Sequence[Action]) -> None:
        move = {Kind.SPILL: self.store.spill, Kind.PREFETCH: self.store.prefetch, Kind.FORGET: self.store.forget}
        for action in actions:
            assert action.microbatch is not None
            move[action.kind]((action.shard, action.microbatch))


def test_within_the_budget_no_boundary_is_spilled() -> None:
    shelf = Shelf()
    planned = Planned(3, shelf)
    for k in range(3):
        planned.put(k, [k])
    assert [planned.use(k, k) for k in range(3)] == [0, 1, 2]
    assert shelf.stored == []
    assert planned.meter.bytes_spilled == 0


def test_the_boundary_needed_last_is_spilled() -> None:
    shelf = Shelf()
    planned = Planned(2, shelf)
    for k, use in ((0, 5), (1, 9), (2, 7)):
        planned.put(k, [use])
    planned.store.close()
    assert shelf.stored == [1.0]


def test_a_value_is_written_once_however_often_it_returns() -> None:
    shelf = Shelf()
    planned = Planned(1, shelf)
    planned.put(1, [1, 4, 9])
    planned.put(2, [2, 3, 8])
    for now, k in ((1, 1), (2, 2), (3, 2), (4, 1), (8, 2), (9, 1)):
        planned.use(k, now)
        planned.end_use(k)
    planned.store.close()
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
    planned = Planned(budget, shelf, seed)
    order = [k for one in passes for k in one]
    for k in range(5):
        planned.put(k, [now for now, other in enumerate(order) if other == k])
    for now, k in enumerate(order):
        planned.use(k, now)
        if ahead and now + 1 < len(order):
            planned.prefetch(order[now + 1])
        assert planned.meter.held_bytes <= (budget + MOVING) * BYTES
        planned.end_use(k)
        assert planned.meter.held_bytes <= (budget + MOVING) * BYTES
    for k in range(5):
        planned.store.drop((1, k))
    planned.store.close()
    assert planned.meter.held_bytes == 0
    assert shelf.rest == {}
    assert shelf.closed


def test_a_boundary_that_is_read_just_now_does_not_leave() -> None:
    planned = Planned(0, Shelf())
    planned.put(0, [0, 99])
    planned.use(0, 0)
    planned.put(1, [1])
    planned.put(2, [2])
    assert planned.store._entries[1, 0].leaves is not None
    planned.end_use(0)
    assert planned.store._entries[1, 0].leaves is None


def test_a_value_changed_in_place_is_not_used() -> None:
    store = SpillingStore(None, LateLane(0), Meter(CPU))
    x = torch.zeros(3)
    store.put((2, 0), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"enters shard 2 \(micro-batch 0\) was changed in place"):
        store.get((2, 0))


def test_a_store_that_is_dropped_gives_its_bytes_back() -> None:
    planned = Planned(1, Shelf())
    for k in range(4 + MOVING):
        planned.put(k, [k])
    assert planned.meter.held_bytes > 0
    planned.store = None  # type: ignore[assignment]
    assert planned.meter.held_bytes == 0


def test_an_alias_counts_once() -> None:
    meter = Meter(CPU)
    store = SpillingStore(None, LateLane(0), meter)
    x = torch.zeros(10)
    assert store.put((1, 0), (x, x.view(2, 5))) == BYTES
    assert meter.held_bytes == BYTES
