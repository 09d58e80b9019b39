"""What a forecast is made of: the steps after the first, which also makes files, buffers and pages."""

from __future__ import annotations

import torch

from offload.lane import Clock
from offload.statistics import Meter

CPU = torch.device("cpu")


class Told(Clock):
    """A clock that is told what time has passed."""

    def pass_time(self, seconds: float) -> None:
        self._seconds += seconds


def took(meter: Meter, seconds: float, rows: int) -> None:
    """One cell of shard 0, one load and one drain, each of so many seconds."""
    clock = meter.cells.setdefault(("F", 0), Told(CPU))
    meter.rows["F", 0] = meter.rows.get(("F", 0), 0) + rows
    for each in (clock, meter.loading, meter.draining):
        assert isinstance(each, Told)
        each.pass_time(seconds)
    meter.bytes_loaded += 100 * rows
    meter.bytes_stored += 10 * rows


def metered() -> Meter:
    meter = Meter(CPU)
    meter.loading, meter.draining = Told(CPU), Told(CPU)
    return meter


def test_a_forecast_forgets_the_first_step_as_soon_as_there_is_another() -> None:
    meter = metered()
    meter.begin_step()
    took(meter, seconds=8.0, rows=4)
    assert meter.cell_seconds_per_row("F", 0) == 2.0
    assert meter.bandwidths() == (50.0, 5.0)
    meter.begin_step()
    assert meter.cell_seconds_per_row("F", 0) == 2.0  # nothing else has been seen yet
    assert meter.bandwidths() == (50.0, 5.0)
    for _ in range(2):
        took(meter, seconds=1.0, rows=4)
        meter.begin_step()
        assert meter.cell_seconds_per_row("F", 0) == 0.25
        assert meter.bandwidths() == (400.0, 40.0)


def test_a_cell_that_was_never_seen_takes_no_time() -> None:
    assert metered().cell_seconds_per_row("B", 3) == 0.0
