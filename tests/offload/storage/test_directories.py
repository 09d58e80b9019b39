"""A home stays where it was given, in files of its own, and what else lies in its directory is left alone."""

from __future__ import annotations

import copy
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import DiskHome, HomeError, OffloadEmbeddingBag, OffloadModel
from offload.storage.buffer import PAGE_BYTES
from offload.storage.persistent import MANIFEST, read_manifest
from tests.offload.open_files import open_files
from tests.offload.persistent import everything, layers, offloaded, same, train

CPU = torch.device("cpu")


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


# --- os.chdir() -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "home",
    [
        lambda: "./home",
        lambda: Path("home"),
        lambda: DiskHome("home"),
        lambda: DiskHome("./home", keep=True),
        lambda: DiskHome("b/../b"),
    ],
)
def test_a_change_of_the_working_directory_changes_nothing(
    home: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another home of equal layers is at the same place below the new directory, and stays as it is."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def model_in(place: str) -> OffloadModel:
        monkeypatch.chdir(tmp_path / place)
        return OffloadModel(layers(), "cpu", home(), num_slices=3)

    bare = layers()
    expected = train(bare, range(3))
    model, other = model_in("first"), model_in("second")
    before = everything(other)
    assert train(model, range(3)) == expected
    assert same(everything(bare), everything(model))
    assert same(before, everything(other))
    for one in (model, other):
        one.close()
    left = {"home.json", "home.lock", "model.home"}
    for place in ("first", "second"):
        assert {name.split("/")[-1] for name in names(tmp_path / place)} <= left


def test_copies_and_tables_have_their_files_where_the_first_one_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    model, table = OffloadModel(layers(), "cpu", "./home", 2), OffloadEmbeddingBag(9, 4, offload_device="./table")
    monkeypatch.chdir(tmp_path / "second")
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(table)]
    assert len(open_files(tmp_path / "first/home", "weights")) == 3
    assert len(open_files(tmp_path / "first/table")) == 2
    assert open_files(tmp_path / "second") == []
    assert same(everything(made[0]), everything(made[1]))


# --- moved directories ------------------------------------------------------------------------------------------------


def test_a_home_that_is_moved_while_it_is_used_is_not_mistaken_for_the_one_in_its_place(tmp_path: Path) -> None:
    bare = layers()
    expected = train(bare, range(4))
    model = offloaded(layers(), tmp_path / "home")
    found = train(model, range(2))
    (tmp_path / "home").rename(tmp_path / "old")
    other = offloaded(layers(), tmp_path / "home")
    before = everything(other)
    found += train(model, range(2, 4))
    assert found == expected
    assert same(everything(model), everything(bare))
    assert same(everything(other), before)
    model.close()
    other.close()
    for place, values in (("home", before), ("old", everything(bare))):
        again = offloaded(layers("meta"), tmp_path / place)
        assert same(everything(again), values)
        again.close()


# --- what is the user's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["link", "dangling", "fifo", "folder"])
@pytest.mark.parametrize("name", ["home.lock", "model.home"])
def test_a_link_or_special_file_in_the_place_of_ours_is_refused_and_left_alone(
    tmp_path: Path, name: str, what: str
) -> None:
    home, theirs = tmp_path / "home", tmp_path / "theirs"
    offloaded(layers(), home).close()
    (home / name).unlink()
    left = {path.name for path in home.iterdir()}
    if what == "link":
        theirs.write_text("mine")
    make: dict[str, Callable[[Path], object]] = {
        "link": lambda path: path.symlink_to(theirs),
        "dangling": lambda path: path.symlink_to(theirs),
        "fifo": os.mkfifo,
        "folder": Path.mkdir,
    }
    make[what](home / name)
    with pytest.raises(HomeError, match=rf"{name}.*expected a regular file"):
        offloaded(layers("meta"), home)
    assert theirs.exists() is (what == "link")
    assert what != "link" or theirs.read_text() == "mine"
    assert {path.name for path in home.iterdir()} == {*left, name}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"m\xff", b"a b\nc\td", "e\u2028 \u00e9".encode(), b"\\040#"])
def test_a_directory_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    model = offloaded(layers(), folder)
    train(model, range(2))
    model.close()
    again = offloaded(layers("meta"), folder)
    assert same(everything(again), everything(model))
    again.close()


# --- damaged homes ----------------------------------------------------------------------------------------------------


def changed_bytes(path: Path, draw: random.Random) -> None:
    """Of what describes the contents: these have no checksum."""
    data = bytearray(path.with_name(MANIFEST).read_bytes())
    for _ in range(draw.choice([1, 1, 4, 64])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.with_name(MANIFEST).write_bytes(data)


def cut_or_longer(path: Path, draw: random.Random) -> None:
    path = path.with_name(draw.choice([path.name, MANIFEST]))
    data = path.read_bytes()
    at = draw.choice([0, 1, PAGE_BYTES, draw.randrange(len(data))])
    path.write_bytes(draw.choice([data[:at], data[at:], data + data[:at], data[:at] + data]))


def another_manifest(path: Path, draw: random.Random) -> None:
    """One that is consistent with itself, of other fields."""
    manifest = read_manifest(path.parent)
    number = draw.choice([0, 1, 2, 7, PAGE_BYTES, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])
    fields: dict[str, Any] = {
        "clean": bool(number % 2),
        "nbytes": number,
        "tensors": [str(number)],
        "format": str(number),
    }
    name = draw.choice(sorted(fields))
    replace(manifest, **{name: fields[name]}).write(path.parent)


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.filterwarnings("ignore:recovering the home")
def test_a_damaged_home_is_opened_with_its_values_or_refused_by_name(tmp_path: Path, recover: bool) -> None:
    draw = random.Random(2 * recover)
    model = offloaded(layers(), tmp_path / "home")
    train(model, range(1))
    model.close()
    whole = everything(model)
    shutil.copytree(tmp_path / "home", tmp_path / "saved")
    damages = [changed_bytes, cut_or_longer, another_manifest]
    refused: list[str] = []
    for k in range(70):
        shutil.rmtree(tmp_path / "home")
        shutil.copytree(tmp_path / "saved", tmp_path / "home")
        damages[k % len(damages)](tmp_path / "home" / "model.home", draw)
        try:
            found = offloaded(layers("meta"), tmp_path / "home", recover=recover)
        except (HomeError, FileNotFoundError) as error:
            refused.append(str(error))
            continue
        assert same(everything(found), whole)
        found.close()
    assert len(refused) > 40
    assert all(str(tmp_path / "home") in message for message in refused)
