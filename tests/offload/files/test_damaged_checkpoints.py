"""A damaged checkpoint loads right, or is refused by an error that names it; nothing of it runs, hangs or is mixed in.

A file that is a FIFO, a device or a directory is damage, too, and is not waited for.

Damage is drawn by fixed seeds over all files of a checkpoint, of one process and of two ranks.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offload import OffloadModel, OffloadOptimizer, Pretrained, load_checkpoint, save_checkpoint
from offload.files.index import CRC, FILES, INDEX, SAVE, ChecksumError
from offload.files.tensor_file import open_tensors
from offload.untrusted import sum_of, sum_of_values
from tests.offload.side_by_side import advance
from tests.programs import run_program

State = tuple[dict[str, Any], dict[str, Any], Any]


def make(value: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Layers with parameters of one value, and an optimizer that has its states."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, value)
        parameter.grad = torch.full_like(parameter, value + k)
    advance(optimizer)
    return model, optimizer


RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from offload import OffloadModel, OffloadOptimizer, save_checkpoint
from tests.offload.files.test_damaged_checkpoints import make
from tests.offload.mesh.forked import fork

def rank(number):
    dist.init_process_group("gloo", f"file://{sys.argv[1]}/store", rank=number, world_size=2)
    for name, value in (("A", 1.0), ("B", 2.0)):
        layers = make(value)[0]
        mesh = init_device_mesh("cpu", (2,))
        model = OffloadModel(layers, "cpu", num_slices=2, checkpoint_activation=False, mesh=mesh)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(Path(sys.argv[1]) / name, model, optimizer, extra={"run": name})
    dist.destroy_process_group()

assert [child.result()[0] for child in [fork(lambda: rank(0)), fork(lambda: rank(1))]] == [0, 0]
"""


@pytest.fixture(scope="module", params=["one process", "two ranks"])
def saves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints A and B of two runs."""
    folder = tmp_path_factory.mktemp("saves")
    if request.param == "two ranks":
        ended = run_program(RANKS, folder)
        assert ended.status == 0, ended.errors
        return folder
    for name, value in (("A", 1.0), ("B", 2.0)):
        save_checkpoint(folder / name, *make(value), extra={"run": name}, file_bytes=100)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()))


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def load(folder: Path) -> tuple[State, State, Any]:
    """State before and after a load, and what it returned or raised."""
    torch.manual_seed(0)
    model = OffloadModel(make(7.0)[0], "cpu", num_slices=2, checkpoint_activation=False)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)
    model(torch.ones(4, 4)).sum().backward()
    advance(optimizer)
    before = state_of(model, optimizer)
    found: Any
    try:
        found = load_checkpoint(folder, model, optimizer)
    except Exception as error:
        found = error
    return before, state_of(model, optimizer), found


def load_weights(folder: Path) -> tuple[dict[str, Any], Any]:
    """Weights of a model that is made with them, and what that raised."""
    layers = make(7.0)[0]
    try:
        model = OffloadModel(layers, "cpu", num_slices=2, pretrained=folder, checkpoint_activation=False)
    except Exception as error:
        return {}, error
    return dict(model.state_dict()), None


def assert_right_or_refused(folder: Path, right: list[tuple[State, Any]], what: str) -> bool:
    """Whether it was refused; ``right``: what may be loaded, each as a whole."""
    weights, read = load_weights(folder)
    before, after, found = load(folder)
    for raised in (read, found):
        if isinstance(raised, Exception):
            assert type(raised) in (ValueError, ChecksumError, FileNotFoundError), (what, raised)
            assert str(folder) in str(raised), (what, raised)
            assert not isinstance(raised, ChecksumError) or "Restore the file from a copy" in str(raised)
    right_weights = any(equal(weights, state[0]) for state, _ in right)
    assert isinstance(read, Exception) or right_weights, (what, "read other weights")
    if isinstance(found, Exception):
        assert equal(after, before), (what, "refused, but changed", found)
        return True
    assert any(equal(after, state) and found == returned for state, returned in right), (what, "loaded other values")
    return False


# --- kinds of damage --------------------------------------------------------------------------------------------------

VALUES: list[Any] = [None, True, -1, 0, 1, 1.5, 1e300, 10**30, -(10**30), "", "x", "a" * 5000, "../x", "/etc/passwd"]
VALUES += ["\0", "\ud800", [], [[]], {}, {"a": 1}, float("nan"), "state-1", "state-99", "0" * 32, "F64", "BOOL"]
DEEP = "[" * 100_000 + "]" * 100_000


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON tree."""
    found = [path] if path else []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        found += places_in(value, (*path, key))
    return found


def change_json(draw: random.Random, tree: Any) -> str:
    """The text of a tree of which a field is replaced, removed, renamed or added."""
    path = draw.choice(places_in(tree))
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    way = draw.choice(["replace", "replace", "replace", "remove", "rename", "deep", "exchange"])
    if way == "remove":
        del parent[path[-1]]
    elif way == "rename" and isinstance(parent, dict):
        parent[draw.choice(["x", "", "__metadata__", SAVE])] = parent.pop(path[-1])
    elif way == "exchange":
        other = draw.choice([*parent] if isinstance(parent, dict) else range(len(parent)))
        parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
    elif way == "deep":
        parent[path[-1]] = "DEEP"
        return json.dumps(tree).replace('"DEEP"', DEEP)
    else:
        parent[path[-1]] = draw.choice(VALUES)
    return json.dumps(tree)


def change_bytes(draw: random.Random, data: bytes) -> bytes:
    begin, count = draw.randrange(len(data) + 1), draw.choice([1, 2, 8, 64, 500])
    drawn, left = draw.choice([bytes(count), draw.randbytes(count)]), data[begin + count :]
    before = data[:begin]
    return draw.choice([before, before + left, before + drawn + before, before + drawn + left, data + drawn])


def damage(draw: random.Random, folder: Path, other: Path) -> str:
    """Damages a checkpoint in one place; ``other`` has the same files, of another save."""
    files, ids = files_of(folder), [state_in(each).name.removeprefix("state-") for each in (folder, other)]
    name = draw.choice(files)
    path = folder / name
    data = path.read_bytes()
    way = draw.choice(["bytes", "bytes", "json", "json", "length", "save", "swap", "missing", "special"])
    if way == "json" and name.suffix == ".json":
        path.write_text(change_json(draw, json.loads(data)))
    elif way in ("json", "length") and name.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        if way == "json":
            text = change_json(draw, json.loads(data[8 : 8 + length])).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        else:
            wrong = draw.choice([0, 1, length - 1, length + 1, len(data), 40 << 30, (1 << 64) - 1])
            path.write_bytes(wrong.to_bytes(8, "little") + data[8:])
    elif way == "save":
        for each in draw.sample(files, draw.randint(1, len(files) - 1)):
            shutil.copy(other / str(each).replace(*ids), folder / each)
    elif way == "swap":
        path.write_bytes((folder / (second := draw.choice(files))).read_bytes())
        (folder / second).write_bytes(data)
    elif way in ("missing", "special"):
        path.unlink()
        link = draw.choice(["/dev/zero", "/dev/stdin", str(other / name), str(path), str(folder), "nothing"])
        if way == "special":
            draw.choice([lambda: os.mkfifo(path), lambda: path.mkdir(), lambda: path.symlink_to(link)])()
    else:
        path.write_bytes(change_bytes(draw, data))
    return f"{way} in {name}"


@pytest.mark.parametrize(
    ("seed", "times"), [(0, 150), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 7))]
)
def test_a_damaged_checkpoint_loads_right_or_is_refused_and_nothing_is_changed(
    saves: Path, tmp_path: Path, seed: int, times: int
) -> None:
    draw = random.Random(seed)
    right = [load(saves / name)[1:] for name in "AB"]
    refused = 0
    for k in range(times):
        folder = tmp_path / "c"
        shutil.copytree(saves / "A", folder)
        what = f"{k}: {damage(draw, folder, saves / 'B')}"
        refused += assert_right_or_refused(folder, right, what)
        shutil.rmtree(folder)
    assert refused > times // 2


# --- damage of its own kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x.safetensors", "", "a/../../x.safetensors", "/etc/passwd", "\0", "\ud800"])
def test_an_index_names_only_files_in_its_folder(tmp_path: Path, name: str) -> None:
    save_file({"0.weight": torch.ones(4, 4)}, tmp_path / "x.safetensors")
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"0.weight": name}}))
    for read in (Pretrained, partial(load_checkpoint, model=nn.Sequential(nn.Linear(4, 4, bias=False)))):
        with pytest.raises(ValueError, match=r"index\.json: weight_map: '0\.weight': expected the name of a file"):
            read(folder)


def test_a_link_of_an_index_leads_nowhere_but_into_the_cache_that_holds_the_folder(tmp_path: Path) -> None:
    """The cache of the Hugging Face Hub: ``snapshots/REVISION/NAME`` is a link to ``../../blobs/DIGEST``."""
    blobs, snapshot, other = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "f00", tmp_path / "other"
    for folder in (blobs, snapshot, other):
        folder.mkdir(parents=True)
    save_file({"0.weight": torch.ones(4, 4)}, blobs / "d1g35t")
    index = json.dumps({"weight_map": {"0.weight": "model-00001-of-00001.safetensors"}})
    for folder in (snapshot, other):
        (folder / INDEX).write_text(index)
        (folder / "model-00001-of-00001.safetensors").symlink_to(os.path.relpath(blobs / "d1g35t", folder))
    assert [name for name, _, _ in Pretrained(snapshot).headers()] == ["0.weight"]
    with pytest.raises(ValueError, match=r"a link to .*d1g35t; put the file itself into the folder"):
        Pretrained(other)


def test_a_file_that_is_exchanged_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    for value, name in enumerate(("x", "y")):
        save_file({"a": torch.full((4,), float(value))}, tmp_path / name)
    stored, found = open_tensors(tmp_path / "x")["a"], torch.ones(4)
    os.replace(tmp_path / "y", tmp_path / "x")
    stored.read_into(found)
    assert torch.equal(found, torch.zeros(4))


class Code:
    """Runs code where it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.flag),)


def state_in(folder: Path) -> Path:
    """The folder of the states."""
    return folder / f"state-{json.loads((folder / INDEX).read_text())['metadata'][SAVE]}"


def with_sum_of(state: Path) -> None:
    """Gives the index the checksums that the file of a state, and the index itself, have."""
    path = state.parent.parent / INDEX
    index = json.loads(path.read_text())
    metadata = index["metadata"]
    metadata[FILES][f"{state.parent.name}/{state.name}"] = sum_of(state)
    del metadata[CRC]
    metadata[CRC] = sum_of_values([index["weight_map"], metadata])
    path.write_text(json.dumps(index))


def test_no_code_of_a_checkpoint_runs(saves: Path, tmp_path: Path) -> None:
    folder, flag = tmp_path / "c", tmp_path / "ran"
    shutil.copytree(saves / "A", folder)
    state = state_in(folder)
    for protocol in range(6):
        (state / ".metadata").write_bytes(pickle.dumps(Code(flag), protocol))
        load_checkpoint(folder, make()[0])
    for write in (
        lambda path: path.write_bytes(pickle.dumps(Code(flag))),
        lambda path: torch.save({"extra": Code(flag)}, path),
    ):
        write(state / "state.pt")
        with_sum_of(state / "state.pt")
        with pytest.raises(ValueError, match=r"state\.pt: expected the state of a checkpoint"):
            load_checkpoint(folder, make()[0])
    assert not flag.exists()


@pytest.mark.parametrize("way", ["compressed", "without keys"])
def test_a_state_file_that_is_no_state_is_refused(tmp_path: Path, way: str) -> None:
    save_checkpoint(tmp_path, *make())
    path = state_in(tmp_path) / "state.pt"
    if way == "compressed":
        with zipfile.ZipFile(path) as archive:
            entries = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry, data in entries.items():
                archive.writestr(entry, data if not entry.endswith("data/0") else bytes(1 << 20))
    else:
        torch.save({}, path)
    with_sum_of(path)
    message = {"compressed": "larger than the file", "without keys": "missing .* 'optimizer'"}
    with pytest.raises(ValueError, match=rf"state\.pt: .*{message[way]}"):
        load_checkpoint(tmp_path, *make())
