"""A home that outlives its model is adopted exactly as it was left, or refused with the reason."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import DiskHome, HomeError, OffloadEmbeddingBag
from offload.storage import PersistentTier, Tier
from offload.storage.persistent import read_manifest
from tests.offload.persistent import WIDTH, everything, layers, offloaded, same, train
from tests.offload.storage.test_disk_direct import Calls
from tests.offload.storage.test_tiers import TierContract
from tests.programs import run_program


@pytest.fixture
def left(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A home that was trained on and closed, and what was in it."""
    folder = tmp_path / "home"
    model = offloaded(layers(), folder)
    train(model, range(3))
    model.close()
    return folder, everything(model)


# --- adopted ----------------------------------------------------------------------------------------------------------


def test_training_continues_in_other_cuts(tmp_path: Path) -> None:
    bare, folder = layers(), tmp_path / "home"
    losses = train(bare, range(15))
    ours: list[float] = []
    inodes = set()
    for begin, slices in zip(range(0, 15, 3), (3, 1, 5, 2, 4), strict=True):
        model = offloaded(layers("cpu" if begin == 0 else "meta"), folder, slices=slices)
        inodes.add((folder / "model.home").stat().st_ino)
        ours += train(model, range(begin, begin + 3))
        model.close()
    assert ours == losses
    assert same(everything(bare), everything(model))
    assert len(inodes) == 1


def test_an_adopted_home_reads_only_its_buffers(
    left: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = left
    calls = Calls(monkeypatch)
    model = offloaded(layers("meta"), folder)
    read = [nbytes for name, _, nbytes, _ in calls.log if name == "preadv"]
    assert sum(read) == sum(buffer.nbytes for buffer in model.buffers())
    assert same(everything(model), before)
    model.close()


def test_overwriting_is_done_when_asked_for(left: tuple[Path, dict[str, Tensor]]) -> None:
    (left[0] / "notes.txt").write_text("mine")
    model = offloaded(layers(), left[0], slices=2, overwrite=True)
    assert same(everything(model), everything(layers()))
    model.close()
    assert (left[0] / "notes.txt").read_text() == "mine"
    offloaded(layers("meta"), left[0], slices=2).close()


def test_the_manifest_of_a_file_that_is_gone_does_not_vouch_for_the_next(left: tuple[Path, dict[str, Tensor]]) -> None:
    (left[0] / "model.home").unlink()
    tier = PersistentTier(DiskHome(left[0], keep=True), torch.device("cpu"))
    assert not tier.adopt([], 8, blank=True)
    tier.contents()  # a kill from here on leaves a file that was never closed
    assert not (left[0] / "home.json").exists()


def test_an_error_of_the_manifest_names_it_and_close_may_be_repeated(left: tuple[Path, dict[str, Tensor]]) -> None:
    model, in_the_way = offloaded(layers("meta"), left[0]), left[0] / "home.json.new"
    in_the_way.mkdir()
    with pytest.raises(OSError, match=str(left[0] / "home.json")):
        model.close()
    in_the_way.rmdir()
    model.close()
    assert read_manifest(left[0]).clean


# --- refused ----------------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_refused(folder: Path, match: str, model: nn.Module | None = None, **choices: int) -> None:
    """It is refused, twice for the same reason; nothing is changed, in the files or in the layers."""
    before = snapshot(folder)
    model = layers("meta") if model is None else model
    for _ in range(2):
        with pytest.raises(HomeError, match=match):
            offloaded(model, folder, **choices)  # type: ignore[arg-type]
        assert snapshot(folder) == before
        assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_offload_19_a_stale_or_foreign_file_with_the_right_name_is_never_trusted(
    left: tuple[Path, dict[str, Tensor]],
) -> None:
    """diffusers trusts any file of the right name. Ours: one of another program."""
    folder, _ = left
    (folder / "home.json").unlink()
    assert_refused(folder, r"expected the manifest of a home: .*home.json")
    (folder / "home.json").write_text('{"clean": true}')
    assert_refused(folder, r"home.json: damaged, or of another program")


def test_a_home_of_another_format_is_refused(left: tuple[Path, dict[str, Tensor]]) -> None:
    replace(read_manifest(left[0]), format="home 3").write(left[0])
    assert_refused(
        left[0], "home.json: expected the format 'home 5', got 'home 3'. Open it with the release that wrote"
    )
    offloaded(layers(), left[0], overwrite=True).close()
    offloaded(layers("meta"), left[0]).close()


def test_another_model_is_refused_and_told_the_first_difference(left: tuple[Path, dict[str, Tensor]]) -> None:
    folder = left[0]
    assert_refused(
        folder, r"expected '0.weight float32 \[16, 12\].*', got '0.weight float32 \[12, 12\]", layers("meta", width=16)
    )
    assert_refused(folder, r"model.home.*expected '4.weight", layers("meta", tied=False))
    assert_refused(folder, r"float64", layers("meta").double())
    with torch.device("meta"):
        more = nn.Sequential(*layers("meta"), nn.BatchNorm1d(WIDTH, affine=False))
    assert_refused(folder, "model.home.*expected 15 tensors, got 12", more)
    without = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"))
    assert_refused(folder, "model.home: expected 2 tensors, got 12. Pass the layers", without, slices=1)


def test_layers_with_values_do_not_silently_lose_to_a_home_nor_win_over_it(
    left: tuple[Path, dict[str, Tensor]],
) -> None:
    assert_refused(left[0], "holds a home already, and the layers have values, too", layers())


def test_a_home_that_is_in_use_is_refused(left: tuple[Path, dict[str, Tensor]]) -> None:
    model = offloaded(layers("meta"), left[0])
    with pytest.raises(HomeError, match="is in use by another model"):
        offloaded(layers("meta"), left[0])
    train(model, range(1))
    model.close()
    offloaded(layers("meta"), left[0]).close()


SCRIPT = """
import os, sys, torch
from tests.offload.persistent import layers, offloaded, train

home, out, how = sys.argv[1:]
model = offloaded(layers(), home)
train(model, range(2))
if how == "killed later":
    model.close()
    model = offloaded(layers("meta"), home)
    train(model, range(2, 4))
torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, out)
if how == "raises":
    raise ArithmeticError("in the user's loop")
if how != "ends":
    os._exit(1)
"""


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_a_home_is_closed_when_the_program_ends(how: str, tmp_path: Path) -> None:
    ended = run_program(SCRIPT, tmp_path / "home", tmp_path / "weights.pt", how)
    assert ended.status == (how == "raises"), ended.errors
    assert "ended without close" not in ended.errors
    again = offloaded(layers("meta"), tmp_path / "home")
    expected = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(p, expected[name]) for name, p in again.named_parameters())
    again.close()


def test_a_model_collected_without_close_warns_and_its_home_is_refused(tmp_path: Path) -> None:
    def lose() -> None:
        offloaded(layers(), tmp_path)
        gc.collect()

    with pytest.warns(RuntimeWarning, match=r"ended without close\(\): the home is marked as open"):
        lose()
    assert_refused(tmp_path, "expected a home that was closed")


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_new_home_that_could_not_be_made_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            offloaded(layers(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["home.lock"]
    model = offloaded(layers(), tmp_path)
    model.close()


def test_what_a_home_cannot_be_is_refused(tmp_path: Path) -> None:
    for choices, match in (
        ({"overwrite": True}, "overwrite=True is for a persistent home; pass keep=True with it"),
        ({"recover": True}, "recover=True is for a persistent home"),
        ({"keep": True, "overwrite": True, "recover": True}, "pass one of them"),
    ):
        with pytest.raises(ValueError, match=match):
            DiskHome(tmp_path, **choices)
    with pytest.raises(ValueError, match="supported by OffloadModel without mesh= only"):
        OffloadEmbeddingBag(4, 4, offload_device=DiskHome(tmp_path, keep=True))
    for several in (3, [tmp_path], [tmp_path / "a", tmp_path / "b"]):
        with pytest.raises(TypeError, match=r"expected one directory, got .*RAID 0"):
            DiskHome(several)  # type: ignore[arg-type]


# --- recovered --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["killed", "killed later"])
def test_a_home_of_a_process_that_was_killed_between_steps_is_recovered(how: str, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "weights.pt"
    assert run_program(SCRIPT, home, out, how).status == 1
    with pytest.raises(HomeError, match=r"ended without close\(\).*recover=True"):
        offloaded(layers("meta"), home)
    with pytest.warns(RuntimeWarning, match="its contents cannot be verified"):
        model = offloaded(layers("meta"), home, recover=True)
    for name, value in torch.load(out, weights_only=True).items():
        assert torch.equal(model.get_parameter(name), value), name
    train(model, range(4, 5))
    left = everything(model)
    model.close()
    for recover in (False, True):  # it is whole again, so there is nothing to warn of
        model = offloaded(layers("meta"), home, recover=recover)
        assert same(everything(model), left)
        model.close()


class TestKeptTier(TierContract):
    """A kept home keeps the contract of all tiers, for what it keeps."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        tier = PersistentTier(DiskHome(tmp_path, keep=True), torch.device("cpu"))
        made: list[PersistentTier] = [tier]

        def allocate(nbytes: int, label: str) -> object:
            one = PersistentTier(DiskHome(tmp_path / f"part-{len(made)}", keep=True), torch.device("cpu"))
            made.append(one)
            one.adopt([f"{label} {nbytes}"], nbytes, blank=True)
            return one.contents()

        tier.allocate = allocate  # type: ignore[method-assign, assignment]
        return tier
