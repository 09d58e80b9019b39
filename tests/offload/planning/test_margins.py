"""What steps take beside what is counted: reported on the CPU, left free by later plans on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.planner.step_memory import LATEST, StepMemory


def measured(steps: list[tuple[float, int, bool]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of steps with so many rows and bytes, whose plan is new or not."""
    memory, found = StepMemory(torch.device("cpu"), 0), []
    monkeypatch.setattr("offload.planner.step_memory.anonymous_bytes", lambda: 0)
    memory._made = 1 << 60  # so that nothing that this process holds counts
    predicted: Any = SimpleNamespace(peak=SimpleNamespace(begin=0, memory=100))
    for rows, peak, new in steps:
        monkeypatch.setattr(memory._peak, "rise", lambda peak=peak: peak)
        memory.fresh = new
        memory.begin()
        memory.end(rows, predicted, probes=False)
        found.append(memory.beside(rows))
    return found


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize(
    ("steps", "beside"),
    [
        pytest.param([(8, 500, True), (8, 120, False)], [0, 20], id="not of the first step of a plan"),
        pytest.param([(8, 130, False), (8, 150, False), (8, 90, False)], [30, 50, 50], id="most of the latest"),
        pytest.param([(8, 120, False), (8, 110, True)], [20, 20], id="as it was"),
        pytest.param([(8, 130, False)] + [(8, 110, False)] * LATEST, [30] * LATEST + [10], id="not of long ago"),
        pytest.param([(16, 300, False), (8, 110, False), (16, 300, False)], [200, 10, 200],
                     id="its own, where a larger size took more"),
    ],
)  # fmt: skip
def test_on_a_device_it_is_left_free_for_later_steps_of_their_size(
    steps: list[tuple[float, int, bool]], beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured(steps, monkeypatch) == beside


def test_on_the_cpu_a_new_plan_is_measured_anew_and_its_first_step_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [(8, 130, False), (8, 500, True), (8, 120, False), (8, 110, False), (8, 115, False)]
    assert measured([*steps[:1], *steps], monkeypatch) == [30, 30, 400, 20, 20, 20]
