"""A persistent home whose model ended without close() is adopted on request, after every possible verification."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload import DiskHome, HomeError
from offload.storage.manifest import read_manifest, write_manifest
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
    with pytest.warns(RuntimeWarning, match=r"the contents of weights, buffers cannot be verified"):
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
    path = folder / "weights.home"
    os.truncate(path, path.stat().st_size - 4096)


def of_another_home(folder: Path) -> None:
    other = folder.parent / "other"
    never_closed(other)
    os.replace(other / "buffers.home", folder / "buffers.home")


def of_an_older_generation(folder: Path) -> None:
    path = folder / "buffers.home"
    manifest = read_manifest(path, "buffers")
    write_manifest(path, type(manifest)(**{**vars(manifest), "generation": manifest.generation + 2}))


def missing(folder: Path) -> None:
    (folder / "buffers.home").unlink()


@pytest.mark.filterwarnings("ignore:the model with the persistent home:RuntimeWarning")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "expected a file that ends with a manifest"),
        (of_another_home, "expected generation 1 of home .* got generation 1 of home"),
        (of_an_older_generation, "expected generation 1 of home .* got generation 3 of home"),
        (missing, "expected a file, there is none"),
    ],
)
def test_recovery_verifies_size_home_and_generation_of_every_file(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    never_closed(tmp_path / "home")
    damage(tmp_path / "home")
    with pytest.raises(HomeError, match=message):
        offloaded(layers("meta"), tmp_path / "home", recover=True)


def test_a_process_that_ended_while_it_opened_a_home_leaves_it_recoverable(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    train(model, range(1))
    left = everything(model)
    model.close()
    path = tmp_path / "weights.home"  # the first manifest that is marked as open when a home is opened
    manifest = read_manifest(path, "weights")
    write_manifest(path, type(manifest)(**{**vars(manifest), "clean": False, "generation": manifest.generation + 1}))
    with pytest.warns(RuntimeWarning, match="the contents of weights cannot be verified"):
        model = offloaded(layers("meta"), tmp_path, recover=True)
    assert all(torch.equal(value, left[name]) for name, value in everything(model).items())
    model.close()
    offloaded(layers("meta"), tmp_path).close()


def test_a_home_that_was_closed_is_recovered_without_a_warning_and_verified(tmp_path: Path) -> None:
    model = offloaded(layers(), tmp_path)
    model.close()
    offloaded(layers("meta"), tmp_path, recover=True).close()
    with (tmp_path / "weights.home").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(HomeError, match="do not match their checksum"):
        offloaded(layers("meta"), tmp_path, recover=True)


def test_recovering_is_for_kept_homes_that_are_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="recover=True is for a persistent home"):
        DiskHome(tmp_path, recover=True)
    with pytest.raises(ValueError, match="pass one of them"):
        DiskHome(tmp_path, keep=True, overwrite=True, recover=True)
