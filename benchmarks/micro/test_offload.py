"""What the engine does around the layers: plans, copies, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import OffloadModel
from offload.files.tensor_file import TensorFile, write_tensors
from offload.planning.budget import fit
from offload.planning.plan import validate
from offload.planning.planner import plan_step
from offload.planning.simulate import Costs, simulate

MEBIBYTE = 2**20


@pytest.mark.parametrize("shards", [10, 1000])
def test_plan_a_step(benchmark: Any, shards: int) -> None:
    assert benchmark(plan_step, shards, slots=4, microbatches=4).actions


@pytest.mark.parametrize("shards", [10, 1000])
def test_validate_and_simulate_a_plan(benchmark: Any, shards: int) -> None:
    plan = plan_step(shards, slots=4, microbatches=4)
    costs = Costs(*([1.0] * shards for _ in range(4)), slot_bytes=1)

    def work() -> float:
        validate(plan)
        return simulate(plan, costs).seconds

    assert benchmark(work) > 0


def test_fit_a_budget_to_100_layers(benchmark: Any) -> None:
    layers = [MEBIBYTE + k for k in range(100)]
    assert benchmark(fit, layers, layers, 64 * MEBIBYTE, shards=None).slots >= 2


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_step_that_only_moves_parameters(benchmark: Any, home: str, tmp_path: Path) -> None:
    """Loads 2 x 64 MiB less what is still resident, drains 64 MiB; one row goes past, with next to no compute."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    place = "cpu" if home == "host" else tmp_path
    model = OffloadModel(layers, "cpu", place, num_slices=16, checkpoint_activation=True)
    row = torch.ones(1, 1024)

    def step() -> None:
        model.zero_grad()
        model(row).sum().backward()

    step()
    benchmark(step)
    assert model.statistics().bytes_stored >= 64 * MEBIBYTE


def test_write_a_file_of_64_mebibytes(benchmark: Any, tmp_path: Path) -> None:
    tensors = {f"layer.{k}": torch.ones(MEBIBYTE) for k in range(16)}
    path = tmp_path / "tensors.safetensors"
    benchmark.pedantic(write_tensors, (path, tensors), setup=lambda: path.unlink(missing_ok=True), rounds=5)


def test_open_a_file_of_1000_tensors(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "tensors.safetensors"
    write_tensors(path, {f"layer.{k}": torch.ones(16) for k in range(1000)})
    benchmark(TensorFile, path)
