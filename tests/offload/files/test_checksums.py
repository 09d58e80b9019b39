"""Checksums of checkpoints: what was damaged on the disk is refused, with its name, and not trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import OffloadModel, load_checkpoint, save_checkpoint
from offload.files.save_folder import INDEX
from offload.files.tensor_file import TensorFile, write_tensors
from tests.offload.files.test_checkpoint import assert_same_state, make, state_of, train
from tests.offload.zoo import build


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def damaged(folder: Path, what: str) -> Path:
    """Flips a bit in the last tensor of a checkpoint's weights or states, or in the rest."""
    pattern = {"weights": "model-*.safetensors", "states": "state-*/*.safetensors", "rest": "state-*/state.pt"}[what]
    path = sorted(folder.glob(pattern))[-1]
    flip(path, path.stat().st_size - 2 if what != "rest" else path.stat().st_size // 2)
    return path


@pytest.mark.parametrize("what", ["weights", "states", "rest"])
def test_a_flipped_byte_is_refused_before_anything_is_overwritten(tmp_path: Path, home: str, what: str) -> None:
    model, optimizer, schedule = make(home)
    train(model, optimizer, schedule, range(2))
    save_checkpoint(tmp_path / "c", model, optimizer, file_bytes=500)
    path = damaged(tmp_path / "c", what)
    train(model, optimizer, schedule, range(2, 3))
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match="are not those that were written") as caught:
        load_checkpoint(tmp_path / "c", model, optimizer)
    assert str(path) in str(caught.value)
    assert "Restore the file from a copy" in str(caught.value)
    assert_same_state(state_of(model, optimizer), before)


def test_pretrained_weights_with_a_flipped_byte_are_refused(tmp_path: Path) -> None:
    source = build(("linear", "linear"), seed=1)
    save_checkpoint(tmp_path / "c", source)
    damaged(tmp_path / "c", "weights")
    with pytest.raises(ValueError, match="are not those that were written"):
        OffloadModel(
            build(("linear", "linear"), seed=2),
            "cpu",
            num_slices=2,
            pretrained=tmp_path / "c",
            checkpoint_activation=False,
        )


def test_no_flipped_bit_of_a_file_makes_another_tensor(tmp_path: Path) -> None:
    """In its header or its bytes."""
    path = tmp_path / "x"
    written = write_tensors(path, {"aa": torch.arange(10.0), "bb": torch.arange(4, dtype=torch.int32)})
    TensorFile(path, written).verify()
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip(path, position)
        with pytest.raises(ValueError, match=f"^{path}: "):
            TensorFile(path, written).read_into("aa", torch.zeros(10))
        path.write_bytes(whole)


def test_an_index_is_the_one_that_was_written(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, build(("linear", "linear"), seed=1), file_bytes=300)
    path = tmp_path / INDEX
    whole = path.read_text()
    path.write_text(whole.replace('"1.weight"', '"7.weight"'))
    with pytest.raises(ValueError, match="the index is not the one that was written"):
        load_checkpoint(tmp_path, build(("linear", "linear"), seed=2))
