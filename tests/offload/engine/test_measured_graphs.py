"""How many bytes a cell saves is measured in the first forwards of each shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload.engine.observed
from offload import MemoryPolicy, OffloadModel

WIDTH = 16


def test_the_bytes_of_graphs_are_measured_a_few_times_for_each_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring looks at each tensor that is saved, which takes time."""
    made: list[int] = []

    class Counted(offload.engine.observed.Recorder):
        def __init__(self, *arguments: object) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(offload.engine.observed, "Recorder", Counted)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
    policy = MemoryPolicy("64MiB", graph_bytes=0, slots=2, resident_bytes=0)  # so every cell is recomputed
    model = OffloadModel(layers, "cpu", tmp_path, 3, memory=policy)
    counts, per_row = [], []
    for rows in [4] * 5 + [8] * 5 + [4] * 3:
        made.clear()
        model(torch.randn(rows, WIDTH)).sum().backward()
        model.zero_grad()
        counts.append(len(made) // 3)
        per_row.append([*model._homes.steps.graph_bytes_per_row().values()])
    assert counts == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert all(found == per_row[0] for found in per_row)
    assert per_row[0][1] == pytest.approx(4 * 2 * WIDTH), "input, and what GELU reads"
