"""Bars, on a terminal, for what takes long: weights that are read, checkpoints that are saved and loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from offload import OffloadModel, load_checkpoint, save_checkpoint
from offload.files.tensor_file import write_tensors


def test_bars_say_what_is_read_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, Any]] = []

    def bar(items: Sequence[Any], *, desc: str, unit: str, disable: Any, leave: bool) -> Sequence[Any]:
        seen.append((f"{desc} ({unit})", len(items), disable))
        return items

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=bar))
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    write_tensors(tmp_path / "m.safetensors", {name: p.detach() for name, p in plain.named_parameters()})
    path = tmp_path / "m.safetensors"
    seen.clear()
    model = OffloadModel.from_pretrained(path, "cpu", tmp_path / "home", model=lambda: plain, num_slices=3)
    assert seen == [("reading weights (shard)", 3, None)], "tqdm draws for None on a terminal only"
    seen.clear()
    save_checkpoint(tmp_path / "checkpoint", model)
    assert [number for what, number, _ in seen if what.startswith("saving ") and what.endswith("(tensor)")] == [6]
    seen.clear()
    load_checkpoint(tmp_path / "checkpoint", model)
    assert ("loading the model (tensor)", 6, None) in seen
    model.close()
