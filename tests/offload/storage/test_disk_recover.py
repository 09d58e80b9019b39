"""A persistent home whose model ended without close() is adopted on request, after every possible verification."""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload import DiskHome, HomeError
from offload.storage.persistent import read_manifest, write_manifest
from tests.offload.persistent import everything, layers, offloaded, train
from tests.programs import run_program

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from tests.offload.persistent import everything, layers, offloaded, train

root, closes, out = Path(sys.argv[1]), sys.argv[2] == "closes", sys.argv[3]
model = offloaded(layers(), root / "home")
train(model, range(2))
if closes:
    model.close()
    model = offloaded(layers("meta"), root / "home")
    train(model, range(2, 4))
torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, out)
os._exit(1)
"""


@pytest.mark.parametrize("closes", [False, True])
def test_a_home_of_a_process_that_was_killed_between_steps_is_recovered(closes: bool, tmp_path: Path) -> None:
    out = tmp_path / "weights.pt"
    assert run_program(SCRIPT, tmp_path, "closes" if closes else "ends", out).status == 1
    assert_recovered(tmp_path / "home", out)


def assert_recovered(home: Path, out: Path) -> None:
    with pytest.raises(HomeError, match=r"ended without close\(\).*recover=True"):
        offloaded(layers("meta"), home)
    with pytest.warns(RuntimeWarning, match="its contents cannot be verified"):
        model = offloaded(layers("meta"), home, recover=True)
    for name, value in torch.load(out, weights_only=True).items():
        assert torch.equal(model.get_parameter(name), value), name
    train(model, range(4, 5))
    left = everything(model)
    model.close()
    model = offloaded(layers("meta"), home)  # whole again
    assert all(torch.equal(value, left[name]) for name, value in everything(model).items())
    model.close()


def never_closed(folder: Path) -> None:
    train(offloaded(layers(), folder), range(1))
    gc.collect()


def cut_short(folder: Path) -> None:
    path = folder / "model.home"
    os.truncate(path, path.stat().st_size - 4096)


def of_other_tensors(folder: Path) -> None:
    shutil.rmtree(folder)
    offloaded(layers(tied=False), folder)
    gc.collect()


@pytest.mark.filterwarnings("ignore:the model with the persistent home:RuntimeWarning")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "expected a file that ends with a manifest"),
        (of_other_tensors, "expected .* got"),
    ],
)
def test_recovery_verifies_size_and_tensors(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    never_closed(tmp_path / "home")
    damage(tmp_path / "home")
    with pytest.raises(HomeError, match=message):
        offloaded(layers("meta"), tmp_path / "home", recover=True)


def test_a_process_that_ended_while_it_opened_a_home_leaves_it_recoverable(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    train(model, range(1))
    left = everything(model)
    model.close()
    path = tmp_path / "model.home"
    manifest, _ = read_manifest(path)
    with path.open("r+b") as file:
        write_manifest(file.fileno(), path, replace(manifest, clean=False, generation=manifest.generation + 1))
    with pytest.warns(RuntimeWarning, match="its contents cannot be verified"):
        model = offloaded(layers("meta"), tmp_path, recover=True)
    assert all(torch.equal(value, left[name]) for name, value in everything(model).items())
    model.close()
    offloaded(layers("meta"), tmp_path).close()


def test_a_home_that_was_closed_is_recovered_without_a_warning(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    left = everything(model)
    model.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = offloaded(layers("meta"), tmp_path, recover=True)
    assert all(torch.equal(value, left[name]) for name, value in everything(model).items())
    model.close()


def test_recovering_is_for_kept_homes_that_are_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recover=True is for a persistent home"):
        DiskHome(tmp_path, recover=True)
    with pytest.raises(ValueError, match="pass one of them"):
        DiskHome(tmp_path, keep=True, overwrite=True, recover=True)
