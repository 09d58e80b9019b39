"""On a device, what steps take more than predicted is left free by later plans."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.planner.step_memory import StepMemory

pytestmark = pytest.mark.usefixtures("own_memory")


@pytest.mark.parametrize(
    ("steps", "margins"),
    [
        pytest.param([(8, 500, True), (8, 120, False)], [400, 20], id="of a first step, until a later one"),
        pytest.param([(8, 130, True), (8, 120, False), (8, 150, False), (8, 90, False)], [30, 20, 50, 50], id="stays"),
        pytest.param([(8, 120, True), (8, 120, False), (8, 110, True), (8, 110, False)], [20] * 4, id="as it was"),
        pytest.param([(16, 300, True), (16, 300, False), (8, 110, False), (16, 300, False)], [200, 200, 10, 200],
                     id="its own, where a larger size took more"),
    ],
)  # fmt: skip
def test_what_steps_took_more_is_a_margin_of_later_ones_of_their_size(
    steps: list[tuple[float, int, bool]], margins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps with so many rows and bytes, whose plan is new or not."""
    memory, found = StepMemory(torch.device("cpu")), []
    for rows, peak, new in steps:
        monkeypatch.setattr(memory._peak, "rise", lambda peak=peak: peak)
        memory.fresh |= new
        memory.begin(rows)
        predicted: Any = SimpleNamespace(peak=SimpleNamespace(begin=0, memory=100))
        memory.end(predicted)
        found.append(memory.margin(rows))
    assert found == margins
