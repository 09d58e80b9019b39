"""Records are shown with units."""

from __future__ import annotations

import torch

from offload.engine.plans.prediction import Estimate
from offload.planning.budget import shown_bytes
from offload.telemetry.statistics import Meter


def test_records_are_shown_with_units() -> None:
    shown = str(Estimate(1.5, 0.25, 1.25, 3 << 20, 1 << 30, 2048, 100)).splitlines()
    cells = dict(line.rsplit("  ", 1) for line in shown)
    named = {name.strip(): number.strip() for name, number in cells.items()}
    assert named["seconds"] == "1.5 s"
    assert named["wait seconds"] == "250 ms"
    assert named["bytes loaded"] == "3.0 MiB"
    assert named["bytes stored"] == "1.0 GiB"
    assert named["home bytes"] == "2.0 KiB"
    assert named["memory bytes"] == "100 bytes"
    assert "shard loads" in str(Meter(torch.device("cpu")).read())
    assert shown_bytes((1 << 30) + 1) == "1.1 GiB", "so much is enough"
