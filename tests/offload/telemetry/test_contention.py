"""How much slower layers compute beside copies and updates."""

from __future__ import annotations

import threading

import pytest

from offload.telemetry.contention import LEAST, PRIOR, Contention


def test_the_share_is_that_of_cells_that_did_the_same_work_beside_more_or_less_copying() -> None:
    contention = Contention()
    for k in range(LEAST):
        overlap = (k % 5) / 10
        contention.add_cell("small", 4, 1.0 + 0.4 * overlap, overlap)
        contention.add_cell("large", 4, 2.0 + 0.4 * overlap, overlap)
    assert contention.share() == pytest.approx(0.4)
    assert contention.mean_overlap("small") == pytest.approx(sum((k % 5) / 10 for k in range(LEAST)) / LEAST / 4)


def test_the_overlap_is_that_of_cells_in_steps_that_nothing_disturbed_where_there_are_any() -> None:
    contention = Contention()
    contention.add_cell("cell", 4, 3.0, 2.0, disturbed=True)
    assert contention.mean_overlap("cell") == 0.5
    contention.add_cell("cell", 4, 1.0, 0.0)
    assert contention.mean_overlap("cell") == 0.0


def test_before_there_is_any_difference_the_share_is_assumed() -> None:
    contention = Contention()
    assert contention.share() == PRIOR
    for _ in range(2 * LEAST):
        contention.add_cell("same", 4, 1.0, 0.5)
    assert contention.share() == PRIOR


def test_seconds_of_lanes_in_several_threads_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("offload.telemetry.contention.time.perf_counter", lambda: now[0])
    contention = Contention()
    contention.lane_begins()
    other = threading.Thread(target=contention.lane_begins)
    other.start()
    other.join()
    now[0] = 3.0
    assert contention.busy_seconds() == 6.0
    contention.lane_ends()
    contention.lane_ends()  # of a lane that an interrupt kept from beginning
    now[0] = 5.0
    assert contention.busy_seconds() == 3.0 + 5.0
