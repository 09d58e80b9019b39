"""What a model offers besides running: its layers, its bytes in files, and what it refuses by name."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offload
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.files.checkpoint import INDEX

WIDTH = 16


def model_of(count: int = 4, home: str | Path = "cpu") -> OffloadModel:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    return OffloadModel(layers, "cpu", home, num_slices=2, checkpoint_activation=False)


def test_layers_are_found_as_in_a_sequential() -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    members = list(layers)
    model = OffloadModel(layers, "cpu", num_slices=2, checkpoint_activation=False)
    assert len(model) == 4
    assert list(model) == members
    assert model[0] is members[0]
    assert model[-1] is members[-1]
    some = model[1:3]
    assert isinstance(some, nn.Sequential)
    assert list(some) == members[1:3]
    x = torch.randn(2, WIDTH)
    assert torch.equal(some(x), members[2](members[1](x)))
    with pytest.raises(IndexError):
        model[4]
    with pytest.raises(TypeError):
        model["0"]  # type: ignore[call-overload]


def test_a_layer_that_is_looked_at_holds_what_a_pending_update_made_of_it() -> None:
    model = model_of()
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=1.0)
    before = model[0].weight.detach().clone()  # type: ignore[operator, union-attr]
    model(torch.ones(2, WIDTH)).sum().backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient = gradient.clone()
    optimizer.step()
    assert torch.equal(model[0].weight.detach(), before - gradient)  # type: ignore[arg-type, operator, union-attr]


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


def test_boundary_bytes_may_be_a_string(tmp_path: Path) -> None:
    for size, spilled in ((0, True), ("0 MiB", True), (1 << 20, False), ("1MiB", False)):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        model = OffloadModel(
            layers,
            "cpu",
            tmp_path,
            num_slices=4,
            checkpoint_activation=True,
            num_microbatches=4,
            memory=MemoryPolicy.fixed(boundary_bytes=size),
        )
        model(torch.randn(8, WIDTH)).sum().backward()
        assert (model.statistics().bytes_spilled > 0) == spilled, size


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_saved_state_dict_holds_each_byte_once_and_loads(home: str, tmp_path: Path) -> None:
    model = model_of(8, "cpu" if home == "host" else tmp_path)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights <= len(buffer.getvalue()) < weights + 16384
    buffer.seek(0)
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    bare.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(content: str, tmp_path: Path) -> None:
    model = model_of()
    save_checkpoint(tmp_path, model)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX):
        load_checkpoint(tmp_path, model)


@pytest.mark.parametrize("keep", [0, 7, 200])
def test_a_damaged_state_is_named(keep: int, tmp_path: Path) -> None:
    model = model_of()
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    save_checkpoint(tmp_path, model, optimizer)
    (state,) = tmp_path.glob("state-*/state.pt")
    state.write_bytes(state.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"state\.pt: (the bytes are not those|expected the state of a checkpoint)"):
        load_checkpoint(tmp_path, model, optimizer)


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
