"""What enters recomputed cells stays in memory as far as a budget allows; what backward needs last leaves first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.engine.boundaries import Boundaries
from offload.planning.residency import MOVING
from offload.telemetry.statistics import Meter
from tests.offload.late import LateLane
from tests.offload.scenarios.boundaries import Shelf

BYTES = 40


class Forward:
    """The boundaries of one forward, of which ``boxes`` may stay in memory besides those that move."""

    def __init__(self, boxes: int, seed: int = 0) -> None:
        self.shelf, self.meter = Shelf(), Meter(torch.device("cpu"))
        self.boundaries = Boundaries(self.shelf, LateLane(seed), self.meter, (boxes + MOVING) * BYTES)
        self.saved: list[Any] = []

    def save(self, k: int) -> None:
        self.saved.append(self.boundaries.hooks((k, 0))[0](torch.full((10,), float(k))))

    def load(self, k: int) -> torch.Tensor:
        return self.boundaries.hooks((k, 0))[1](self.saved[k])


def test_within_the_budget_none_leaves() -> None:
    forward = Forward(3)
    for k in range(3):
        forward.save(k)
    assert all((forward.load(k) == k).all() for k in (2, 1, 0))
    assert forward.shelf.stored == []


def test_what_backward_needs_last_leaves_first() -> None:
    forward = Forward(2)
    for k in range(5):
        forward.save(k)
    assert all((forward.load(k) == k).all() for k in (4, 3, 2, 1, 0))
    assert sorted(forward.shelf.stored) == [*range(len(forward.shelf.stored))]  # a late lane writes in any order
    assert 4 not in forward.shelf.stored


def test_a_value_is_written_once_however_often_backward_reads_it() -> None:
    forward = Forward(1)
    for k in range(5):
        forward.save(k)
    for _ in range(3):
        assert all((forward.load(k) == k).all() for k in (4, 3, 2, 1, 0))
    assert len(forward.shelf.stored) == len(set(forward.shelf.stored))


@given(boxes=st.integers(0, 6), count=st.integers(1, 8), seed=st.integers(0, 9))
def test_every_use_sees_its_value_and_the_budget_holds(boxes: int, count: int, seed: int) -> None:
    forward = Forward(boxes, seed)
    for k in range(count):
        forward.save(k)
        assert forward.meter.held_bytes <= (boxes + MOVING) * BYTES
    for k in reversed(range(count)):
        assert (forward.load(k) == k).all()
        forward.saved.pop()


def test_a_value_that_was_changed_in_place_is_refused() -> None:
    forward, x = Forward(3), torch.ones(10)
    save, load = forward.boundaries.hooks((0, 0))
    saved = save(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        load(saved)


def test_a_graph_that_is_dropped_gives_its_bytes_back() -> None:
    forward = Forward(3)
    for k in range(3):
        forward.save(k)
    forward.saved.clear()
    assert forward.meter.held_bytes == 0


def test_a_tensor_that_enters_twice_counts_once() -> None:
    forward, x = Forward(3), torch.ones(10)
    save, _ = forward.boundaries.hooks((0, 0))
    kept = save(x), save(x)
    assert forward.meter.held_bytes == BYTES
    del kept
