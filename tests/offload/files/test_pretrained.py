"""Weights of safetensors files arrive where they rest: all of them or none, once each, and never twice in memory."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadModel, Pretrained, load_checkpoint, load_pretrained, save_checkpoint
from offload.files.tensor_file import StoredTensor, open_tensors, write_tensors
from tests.offload.zoo import WIDTH

INDEX = "model.safetensors.index.json"


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], files: int = 3, stem: str = "model") -> Path:
    """What Hugging Face's ``save_pretrained`` leaves: files that another package wrote, and their index."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number in range(files):
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[number::files]}
        file = f"{stem}-{number + 1:05d}-of-{files:05d}.safetensors"
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def layers(seed: int) -> nn.Sequential:
    """Linear layers, of which two share their weight, batch normalisation with buffers, and a module of modules."""
    torch.manual_seed(seed)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    nn.init.uniform_(inner[1].running_mean)
    return nn.Sequential(first, inner, nn.Sequential(nn.LayerNorm(WIDTH)), last)


def model_of(seed: int, home: str = "cpu", **more: Any) -> OffloadModel:
    return OffloadModel(layers(seed), "cpu", home, num_slices=4, checkpoint_activation=True, **more)


def on_meta() -> nn.Sequential:
    with torch.device("meta"):
        return layers(0)


def saved(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict as files have it: a tied weight once."""
    return {name: value.clone() for name, value in model.state_dict().items() if name != "3.weight"}


def assert_equal(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "directory of one file", "index", "directory", "our own checkpoint"])
def test_every_supported_form_of_weights_is_read(home: str, form: str, tmp_path: Path) -> None:
    source = model_of(1)
    tensors, folder = saved(source), tmp_path / "weights"
    folder.mkdir()
    path = folder
    if form in ("file", "directory of one file"):
        path = folder / "weights.safetensors" if form == "file" else folder
        safetensors.torch.save_file(tensors, folder / "weights.safetensors")
    elif form == "our own checkpoint":
        save_checkpoint(folder, source, file_bytes=300)
    else:
        write_sharded(folder, tensors)
        path = folder / INDEX if form == "index" else folder
    later = model_of(2, home)
    assert load_pretrained(later, path) == ([], [])
    at_once = OffloadModel(on_meta(), "cpu", home, num_slices=4, pretrained=path, checkpoint_activation=False)
    x = torch.randn(5, WIDTH)
    expected = source.eval()(x)
    for model in (later, at_once):
        assert_equal(model, tensors)
        first, last = (dict(model.named_modules())[name] for name in "03")
        assert first.weight is last.weight
        assert torch.equal(model.eval()(x), expected)


class Counted(nn.Linear):
    """Counts how often it initialises itself."""

    resets = 0

    def reset_parameters(self) -> None:
        type(self).resets += 1
        super().reset_parameters()


def test_tensors_found_in_the_files_are_read_once_and_never_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    read_into = StoredTensor.read_into
    monkeypatch.setattr(
        StoredTensor, "read_into", lambda stored, to: (names.append(stored.name), read_into(stored, to))[1]
    )
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    safetensors.torch.save_file(bare.state_dict(), tmp_path / "a.safetensors")
    with torch.device("meta"):
        layers_of_meta = nn.Sequential(*(Counted(WIDTH, WIDTH) for _ in range(3)))
    Counted.resets = 0
    state = torch.get_rng_state()
    model = OffloadModel(layers_of_meta, "cpu", num_slices=3, pretrained=tmp_path, checkpoint_activation=False)
    assert Counted.resets == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(names) == sorted(bare.state_dict())
    assert_equal(model, bare.state_dict())


def test_only_tensors_missing_from_the_files_are_initialised(tmp_path: Path) -> None:
    """The last layer's bias is in no file, and its weight is the first one's, which rests already."""
    tensors = {name: tensor for name, tensor in saved(model_of(1)).items() if name != "3.bias"}
    write_sharded(tmp_path / "weights", tensors)
    weights = Pretrained(tmp_path / "weights", strict=False)
    model = OffloadModel(on_meta(), "cpu", num_slices=4, pretrained=weights, checkpoint_activation=False)
    assert_equal(model, tensors)
    bias = model.state_dict()["3.bias"]
    assert bias.any()
    assert bias.abs().max() <= WIDTH**-0.5


# --- names ------------------------------------------------------------------------------------------------------------


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names as a transformer of Hugging Face has them."""
    places = {to: beginning for beginning, to in PLACES.items()}
    return {places[name[:2]] + name[2:]: tensor for name, tensor in tensors.items()}


PLACES = {"model.embed.": "0.", "model.h.0.": "1.", "model.h.1.": "2.", "model.h.10.": "3."}


def by_hand(name: str) -> str | None:
    """Leaves one name out."""
    if name == "optimizer.step":
        return None
    return next(to + name[len(beginning) :] for beginning, to in PLACES.items() if name.startswith(beginning))


KEY_MAPS: dict[str, Any] = {
    "mapping": PLACES,
    "the longest beginning": {"model.": "nowhere.", **PLACES},
    "function": by_hand,
}


@pytest.mark.parametrize("key_map", list(KEY_MAPS))
def test_names_of_the_files_become_names_of_the_model(key_map: str, tmp_path: Path) -> None:
    tensors = saved(model_of(1))
    extra = {"optimizer.step": torch.zeros(())} if key_map == "function" else {}
    write_sharded(tmp_path / "weights", {**renamed(tensors), **extra})
    model = model_of(2)
    load_pretrained(model, tmp_path / "weights", key_map=KEY_MAPS[key_map])
    assert_equal(model, tensors)
    weights = Pretrained(tmp_path / "weights", key_map=KEY_MAPS[key_map])
    assert_equal(OffloadModel(on_meta(), "cpu", num_slices=2, pretrained=weights), tensors)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path / "weights", saved(model_of(1)))
    with pytest.raises(ValueError, match=r"key_map gives '[\w.]+' and '[\w.]+' of .* one name, 'a'"):
        Pretrained(tmp_path / "weights", key_map=lambda name: "a")


@pytest.mark.parametrize("when", ["construction", "later"])
def test_everything_that_does_not_fit_is_named_and_nothing_is_written(when: str, tmp_path: Path) -> None:
    tensors = saved(model_of(1))
    del tensors["0.bias"]
    wrong = {
        "stranger": torch.zeros(1),
        "3.bias": torch.zeros(3),
        "1.0.bias": torch.zeros(WIDTH, dtype=torch.complex64),
    }
    write_sharded(tmp_path / "weights", {**tensors, **wrong})
    model, bare = model_of(2), on_meta()
    before = copy.deepcopy(model.state_dict())
    load: dict[str, Callable[[], object]] = {
        "later": lambda: load_pretrained(model, tmp_path / "weights"),
        "construction": lambda: OffloadModel(bare, "cpu", tmp_path / "home", 3, pretrained=tmp_path / "weights"),
    }
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load[when]()
    for part in (
        r"missing: 0.bias;",
        "not in the model: stranger",
        f"3.bias has shape (3,), expected ({WIDTH},)",
        "1.0.bias is torch.complex64, which cannot be cast to torch.float32",
    ):
        assert part in f"{caught.value};"
    assert_equal(model, before)
    assert all(p.is_meta for p in bare.parameters())
    assert not (tmp_path / "home").exists()


# --- files ------------------------------------------------------------------------------------------------------------


def break_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lost"] = "model-00001-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


FAULTS: list[tuple[str, Callable[[Path], object], type[Exception], str]] = [
    ("empty", lambda f: [p.unlink() for p in f.iterdir()], FileNotFoundError, "a directory without"),
    ("gone", shutil.rmtree, FileNotFoundError, "path"),
    ("a file gone", lambda f: (f / "model-00002-of-00003.safetensors").unlink(), FileNotFoundError, "00002-of-00003"),
    ("no map", lambda f: (f / INDEX).write_text("{}"), ValueError, "expected an index with a weight_map"),
    ("lost tensor", break_index, ValueError, "lost in model-00001-of-00003"),
    ("several", lambda f: (f / INDEX).unlink(), ValueError, "expected one index or one file"),
    ("cut", lambda f: os.truncate(f / "model-00001-of-00003.safetensors", 200), ValueError, "00001-of-00003"),
]


@pytest.mark.parametrize(("fault", "error", "match"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_files_that_are_not_whole_are_named(
    fault: Callable[[Path], object], error: type[Exception], match: str, tmp_path: Path
) -> None:
    folder = write_sharded(tmp_path / "weights", saved(model_of(1)))
    fault(folder)
    with pytest.raises(error, match=match):
        load_pretrained(model_of(2), folder)


def test_a_model_without_memory_is_told_how(tmp_path: Path) -> None:
    write_sharded(tmp_path / "weights", saved(model_of(1)))
    with pytest.raises(ValueError, match=r"on the meta device, .*pretrained="):
        load_pretrained(on_meta(), tmp_path / "weights")


@settings(max_examples=60)
@given(data=st.data())
def test_any_tensor_is_read_into_any_other(data: st.DataObject, tmp_path_factory: Any) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4), label="shape")
    kinds = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint8]
    kind = data.draw(st.sampled_from(kinds), label="in the file")
    to = data.draw(st.sampled_from([k for k in [*kinds, torch.float64] if torch.can_cast(kind, k)]), label="at home")
    order = data.draw(st.permutations(range(len(shape))), label="order of dimensions")
    tensor = (torch.randn(shape) * 9).to(kind)
    path = tmp_path_factory.mktemp("file") / "a.safetensors"
    write_tensors(path, {"other": torch.zeros(3, dtype=torch.bool), "a": tensor})
    strides = torch.empty([shape[k] for k in order], dtype=to)
    destination = strides.permute([order.index(k) for k in range(len(shape))])
    version = destination._version
    open_tensors(path)["a"].read_into(destination)
    assert torch.equal(destination, tensor.to(to))
    assert destination._version > version or not destination.numel()


# --- bars, on a terminal ----------------------------------------------------------------------------------------------


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
