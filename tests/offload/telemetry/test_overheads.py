"""What steps take beside their cells and waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from offload.telemetry.statistics import Meter

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which is told."""
    told = [0.0]
    for module in ("clock", "overheads", "statistics"):
        monkeypatch.setattr(f"offload.telemetry.{module}.time.perf_counter", lambda: told[0])
    return told


def metered() -> Meter:
    """A meter in a step that nothing disturbs."""
    meter = Meter(CPU)
    meter.begin_step()
    meter.begin_step()
    return meter


def test_what_a_pass_takes_beside_its_cells_and_waits_is_told_for_each_cell(now: list[float]) -> None:
    meter = metered()
    for kind, beside in (("forward", 1.0), ("backward", 2.0)):
        with meter.overheads.in_pass(kind):
            for i in range(3):
                with meter.waiting("L0"):
                    now[0] += 7.0
                with meter.cell(kind[0].upper(), 0, i, 2):
                    now[0] += 5.0
                now[0] += beside
        now[0] += 50.0  # the loss
    assert meter.overheads.seconds_each("forward") == 1.0
    assert meter.overheads.seconds_each("backward") == 2.0
    assert meter.overheads.seconds_each("loss") == 50.0


def test_only_a_forward_right_before_a_backward_tells_how_long_the_loss_takes(now: list[float]) -> None:
    overheads = metered().overheads
    for kind, seconds in (("forward", 4.0), ("forward", 2.0), ("backward", 9.0), ("backward", 0.0)):
        with overheads.in_pass(kind):
            pass
        now[0] += seconds
    assert overheads.seconds_each("loss") == 2.0


def test_the_step_of_an_optimizer_counts_with_zero_grad_without_norms_and_without_what_it_waits_for(
    now: list[float],
) -> None:
    overheads = metered().overheads
    with overheads.optimizer():
        now[0] += 1.0
        with overheads.norms(100):
            now[0] += 5.0
        with overheads.excluded():
            now[0] += 30.0
    with overheads.optimizer(continues=True):
        now[0] += 0.5
    assert overheads.seconds_each("step") == 1.5
    assert overheads.seconds_each("norm") == 0.05
    assert overheads.optimizer_seconds == 36.5


def test_the_model_of_a_step_has_what_its_passes_its_loss_and_its_optimizer_took() -> None:
    model = OffloadModel([nn.Linear(8, 8) for _ in range(3)], "cpu", "cpu", memory="1GiB")
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=1.0)
    for _ in range(16):  # steps that measure memory are not timed, so the last plan may come some steps later
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    costs = model._homes.measured([2]).costs
    found = costs.overheads
    assert min(found.forward, found.backward, found.loss, found.step, *found.norm) > 0
    assert len(found.norm) == 3
    predicted = model.memory_report().predicted
    assert predicted is not None
    assert predicted.overhead_seconds > 0
    parts = predicted.overhead_seconds + predicted.compute_seconds + predicted.wait_seconds
    assert predicted.seconds >= parts * (1 - 1e-12)  # sums in two orders
