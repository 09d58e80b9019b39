"""Checksums of checkpoints: what was damaged on the disk is refused, with its name, and not trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import load_checkpoint, save_checkpoint
from offload.files.tensor_file import TensorFile, write_tensors
from tests.offload.files.test_checkpoint import assert_same_state, make, state_of, train


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
    if what != "rest":
        assert list(TensorFile(path))[-1] in str(caught.value)
    assert_same_state(state_of(model, optimizer), before)


@pytest.mark.parametrize("what", ["weights", "states"])
def test_a_checkpoint_that_memory_cannot_hold_is_verified_while_it_is_read(
    tmp_path: Path, home: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which tensors were overwritten; damaged states are found before the first one is."""
    monkeypatch.setattr("offload.files.checkpoint.available_bytes", lambda: 0)
    model, optimizer, schedule = make(home)
    train(model, optimizer, schedule, range(2))
    save_checkpoint(tmp_path / "c", model, optimizer, file_bytes=500)
    damaged(tmp_path / "c", what)
    train(model, optimizer, schedule, range(2, 3))
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match="are not those that were written") as caught:
        load_checkpoint(tmp_path / "c", model, optimizer)
    after = state_of(model, optimizer)
    assert torch.equal(after[2], before[2])
    torch.testing.assert_close(after[1]["state"], before[1]["state"], rtol=0, atol=0)
    changed = {name for name, value in after[0].items() if not torch.equal(value, before[0][name])}
    assert bool(changed) == (what == "weights")
    named = str(caught.value).partition("The model is not usable now: ")[2].partition(" hold values")[0]
    assert changed <= set(named.split(", "))


def test_no_flipped_bit_of_a_header_makes_another_tensor(tmp_path: Path) -> None:
    """In types, shapes, places or sums: each is either not understood, or changes a checksum."""
    tensors = {"aa": torch.arange(10.0), "bb": torch.arange(4, dtype=torch.int32)}
    for position in range(8, 260):
        path = tmp_path / f"{position}"
        write_tensors(path, tensors)
        flip(path, position)
        try:
            file = TensorFile(path)
            file.verify()
        except ValueError:
            continue
        for name in set(file) & set(tensors):
            assert file.dtype(name) == tensors[name].dtype
            assert torch.equal(file.tensor(name), tensors[name])
