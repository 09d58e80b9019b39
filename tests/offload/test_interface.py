"""What a model offers besides running: its layers, its bytes in files, and what it refuses by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from offload import OffloadModel

WIDTH = 16


def model_of(count: int = 4, home: str | Path = "cpu") -> OffloadModel:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return OffloadModel(layers, "cpu", home, num_slices=2, checkpoint_activation=False)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_backward_after_close_says_that_the_model_was_closed(home: str, recompute: bool, tmp_path: Path) -> None:
    model = OffloadModel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        "cpu",
        "cpu" if home == "host" else tmp_path,
        2,
        recompute,
    )
    loss = model(torch.zeros(2, WIDTH)).sum()
    model.close()
    with pytest.raises(RuntimeError, match="this OffloadModel was closed"):
        loss.backward()


# --- parameters without memory of their own ---------------------------------------------------------------------------


def test_distributed_parameters_are_refused_before_anything_moves(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        distribute_module(layers[1], init_device_mesh("cpu", (1,)))
        before = {name: p.data_ptr() for name, p in layers[0].named_parameters()}
        with pytest.raises(TypeError, match=r"expected dense parameters, got a DTensor \(1\.weight\).*to_local"):
            OffloadModel(layers, "cpu", num_slices=2, checkpoint_activation=False)
        assert {name: p.data_ptr() for name, p in layers[0].named_parameters()} == before
    finally:
        dist.destroy_process_group()


def test_sparse_parameters_are_refused_before_anything_moves() -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"layout torch\.sparse_coo \(0\.weight\)"):
        OffloadModel([layer], "cpu", checkpoint_activation=False)


def test_the_version_is_that_of_the_distribution() -> None:
    setup = Path(__file__).parents[2] / "setup.py"
    told = subprocess.run([sys.executable, setup, "--version"], cwd=setup.parent, capture_output=True, text=True)
    assert told.stdout.split()[-1:] == [offload.__version__]
