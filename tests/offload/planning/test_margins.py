"""On a device, what steps take more than predicted is left free by later plans."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.engine.plans.step_memory import StepMemory

pytestmark = pytest.mark.usefixtures("own_memory")


def margins(monkeypatch: pytest.MonkeyPatch, *steps: tuple[float, int, bool]) -> list[int]:
    """The margin of the rows of each step after it: rows, bytes of its peak, and whether its plan is new."""
    memory = StepMemory(torch.device("cpu"))
    found = []
    for rows, peak, new in steps:
        monkeypatch.setattr(memory._peak, "rise", lambda peak=peak: peak)
        if new:
            memory.fresh = True
        memory.begin(rows)
        predicted: Any = SimpleNamespace(
            peak=SimpleNamespace(begin=0, memory=100), memory_bytes=100 + memory.margin_bytes
        )
        memory.end(predicted)
        found.append(memory.margin(rows))
    return found


def test_what_the_first_step_of_a_plan_takes_holds_until_a_later_step_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert margins(monkeypatch, (8, 500, True), (8, 120, False)) == [400, 20]


def test_what_later_steps_take_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert margins(monkeypatch, (8, 130, True), (8, 120, False), (8, 150, False), (8, 90, False)) == [30, 20, 50, 50]
    assert margins(monkeypatch, (8, 120, True), (8, 120, False), (8, 110, True), (8, 110, False)) == [20, 20, 20, 20]


def test_a_size_learns_its_own_where_a_larger_one_took_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert margins(monkeypatch, (16, 300, True), (16, 300, False), (8, 110, False), (16, 300, False)) == [
        200, 200, 10, 200,
    ]  # fmt: skip
