"""What a forecast is made of: the latest spans after the first step, of which no single one counts for much."""

from __future__ import annotations

import pytest
import torch

from offload.telemetry.clock import LATEST, Clock
from offload.telemetry.statistics import Meter

CPU = torch.device("cpu")


class Told(Clock):
    """A clock that is told how long each span takes."""

    def took(self, seconds: float, amount: int) -> None:
        self._count(seconds, amount, self._disturbed)


def metered() -> tuple[Meter, Told, Told]:
    """A meter, and its clocks of forward cells of shard 0 and of loads."""
    meter, cell, load = Meter(CPU), Told(CPU), Told(CPU)
    meter.cells["F", 0] = cell
    meter._lane_clocks["load"] = load
    return meter, cell, load


def test_a_forecast_forgets_the_first_step_as_soon_as_there_is_another() -> None:
    meter, cell, load = metered()
    meter.begin_step()
    cell.took(8.0, 4)
    load.took(6.0, 3)
    meter.begin_step()
    # Nothing else has been seen yet.
    assert (meter.cell_seconds_per_row("F", 0), meter.copy_seconds_per_byte("load")) == (2.0, 2.0)
    for _ in range(2):
        cell.took(1.0, 4)
        load.took(1.5, 3)
        meter.begin_step()
        assert (meter.cell_seconds_per_row("F", 0), meter.copy_seconds_per_byte("load")) == (0.25, 0.5)


def test_one_disturbed_copy_or_cell_does_not_move_a_forecast() -> None:
    meter, cell, load = metered()
    for clock in (cell, load):
        for seconds in (1.0, 1.0, 900.0, 1.0, 1.0):
            clock.took(seconds, 10)
    assert meter.cell_seconds_per_row("F", 0) == 0.1
    assert meter.copy_seconds_per_byte("load") == 0.1


def test_a_span_weighs_what_it_moved() -> None:
    """Many small copies, each mostly latency, do not hide how fast the large ones are."""
    clock = Told(CPU)
    for _ in range(9):
        clock.took(1.0, 1)
    clock.took(1.0, 100)
    assert clock.seconds_each() == 0.01


def test_the_forecast_of_two_similar_spans_is_their_mean() -> None:
    clock = Told(CPU)
    clock.took(1.0, 10)
    clock.took(3.0, 10)
    assert clock.seconds_each() == pytest.approx(0.2)


def test_a_long_run_remembers_a_bounded_number_of_spans() -> None:
    clock = Told(CPU)
    for k in range(10 * LATEST):
        clock.took(float(k >= 5 * LATEST), 1)
    assert clock.seconds_each() == 1.0
    for _ in range(LATEST // 2 + 1):  # more than half of what it remembers
        clock.took(9.0, 1)
    assert clock.seconds_each() == 9.0


def test_the_first_micro_batch_of_each_visit_counts_although_it_is_in_the_minority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds cold weights and makes the gradients that the others add to."""
    now = [0.0]
    monkeypatch.setattr("offload.telemetry.clock.time.perf_counter", lambda: now[0])
    meter = Meter(CPU)
    for _ in range(3):
        for i in range(4):
            with meter.cell("B", 0, i, 2):
                now[0] += 1.0 if i else 5.0
    assert meter.cell_seconds_per_row("B", 0) == (5.0 + 3 * 1.0) / 8


def test_failed_copies_do_not_enter_the_forecast() -> None:
    meter = Meter(CPU)
    with pytest.raises(OSError, match="unplugged"), meter.on_lane("load", "L0", 8):
        raise OSError("unplugged")
    assert meter.copy_seconds_per_byte("load") == 0.0


def test_a_cell_that_was_never_seen_takes_no_time() -> None:
    assert Meter(CPU).cell_seconds_per_row("B", 3) == 0.0
