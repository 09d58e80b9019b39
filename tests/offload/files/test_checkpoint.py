"""Checkpoints are read by other tools, fit any arrangement of the model, and are whole at any moment."""

from __future__ import annotations

import collections
import copy
import errno
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.files.index import SAVE
from tests.offload.checkpoint_worker import STATES
from tests.offload.files.test_damaged_checkpoints import equal
from tests.offload.pair import Pair
from tests.offload.zoo import WIDTH, build
from tests.programs import run_program

INDEX = "model.safetensors.index.json"
ROOT = Path(__file__).parents[3]


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": biases, "weight_decay": 0.0}, {"params": others}]


def make(
    home: str, slices: int = 4, kinds: tuple[str, ...] = ("linear", "dropout", "batchnorm", "noise", "linear")
) -> Any:
    model = OffloadModel(build(kinds, seed=slices), "cpu", home, num_slices=slices, checkpoint_activation=True)
    arguments = {"lr": 0.01, "betas": (0.8, 0.95), "max_norm": 0.5}
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, params=grouped(model), **arguments)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    numpy_state = np.random.get_state()
    return copy.deepcopy(
        (
            dict(model.state_dict()),
            optimizer.state_dict(),
            torch.get_rng_state(),
            random.getstate(),
            (numpy_state[0], torch.from_numpy(numpy_state[1].astype("int64")), *numpy_state[2:]),
        )
    )


@pytest.mark.parametrize("slices", [1, 7])
def test_a_resumed_run_is_bit_by_bit_the_run_that_never_stopped(tmp_path: Path, home: str, slices: int) -> None:
    """With another number of slices, and from a home in memory to one on disk and back."""
    torch.manual_seed(0)
    model, optimizer, schedule = make(home)
    train(model, optimizer, schedule, range(3))
    save_checkpoint(tmp_path / "run", model, optimizer, extra={"schedule": schedule.state_dict(), "epoch": 2})
    train(model, optimizer, schedule, range(3, 6))
    expected = state_of(model, optimizer)

    other = f"{tmp_path}/other/" if home == "cpu" else "cpu"
    model, optimizer, schedule = make(other, slices)
    found = load_checkpoint(tmp_path / "run", model, optimizer)
    assert (found.step, found.extra["epoch"], optimizer.steps) == (3, 2, 3)
    schedule.load_state_dict(found.extra["schedule"])
    train(model, optimizer, schedule, range(3, 6))
    assert equal(state_of(model, optimizer), expected)


def test_other_tools_read_it(tmp_path: Path, home: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    pair = Pair("adamw", home, kinds=("batchnorm", "linear"))
    pair.do("backward", "step")
    save_checkpoint(tmp_path, pair.model, pair.ours, file_bytes=500)
    index = json.loads((tmp_path / INDEX).read_text())
    state = pair.model.state_dict()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in state.values())
    assert index["weight_map"].keys() == state.keys()
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert torch.equal(opened.get_tensor(name), state[name])
    folder = tmp_path / f"state-{index['metadata'][SAVE]}"
    saved = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    expected = pair.ours.state_dict()["state"]
    assert saved.keys() == {f"state.{n}.{key}" for n, state in expected.items() for key in state}
    assert all(torch.equal(saved[f"state.{n}.{key}"], v) for n, s in expected.items() for key, v in s.items())


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_extra_states_and_strides_survive(tmp_path: Path, home: str) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(
            Extra(4, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
        )

    bare = layers()
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=False)
    save_checkpoint(tmp_path, model)
    other = OffloadModel(layers(), "cpu", home, num_slices=3, checkpoint_activation=False)
    load_checkpoint(tmp_path, other)
    assert other.get_submodule("0").calls == 3
    assert all(map(torch.equal, bare.parameters(), other.parameters()))


def test_a_checkpoint_that_does_not_fit_names_everything_and_changes_nothing(tmp_path: Path, home: str) -> None:
    model, optimizer, _ = make(home)
    save_checkpoint(tmp_path, model, optimizer)
    layers = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    other = OffloadModel(layers, "cpu", home, num_slices=2)
    before = copy.deepcopy(dict(other.state_dict()))
    with pytest.raises(
        ValueError, match=r"nothing was loaded: 2\.weight is missing.*0\.weight is \(8, 8\), expected \(3, 8\)"
    ) as e:
        load_checkpoint(tmp_path, other)
    assert "3.weight is not in the model" in str(e.value)
    torch.testing.assert_close(dict(other.state_dict()), before, rtol=0, atol=0)
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), range(1))
    before = copy.deepcopy(dict(model.state_dict()))
    for kind, given, words in (
        (torch.optim.AdamW, None, "groups of"),
        (torch.optim.SGD, grouped(model), r"of an optimizer with .*betas.*, got one with .*momentum.* the model alone"),
    ):
        with pytest.raises(ValueError, match=words):
            load_checkpoint(tmp_path, model, OffloadOptimizer(model, kind, params=given))
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(ValueError, match="expected an optimizer of this model"):
            call(tmp_path, build(["linear"]), optimizer)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    with pytest.raises(FileNotFoundError, match="got no directory"):
        load_checkpoint(tmp_path / "nothing", model)
    half = OffloadModel(build(["linear"]).to(torch.bfloat16), "cpu", home, num_slices=2, checkpoint_activation=False)
    wide = tmp_path / "wide"
    save_checkpoint(wide, build(["linear"]))
    with pytest.raises(ValueError, match="would lose digits"):
        load_checkpoint(wide, half)


def test_what_only_code_could_load_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    model, optimizer, _ = make("cpu")
    save_checkpoint(tmp_path, model, optimizer, extra=1)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    with pytest.raises(ValueError, match="as extra"):
        save_checkpoint(tmp_path, model, optimizer, extra=Extra)
    with pytest.raises(ValueError, match=r"complex128 \(0\.weight\)"):
        save_checkpoint(tmp_path, nn.Sequential(nn.Linear(1, 1, dtype=torch.complex128)))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names
    assert load_checkpoint(tmp_path, model, optimizer).extra == 1


@pytest.mark.parametrize(
    ("kills", "how"),
    [
        *((9, "full"), (5, "everything"), (3, "keep")),
        *(pytest.param(50, how, marks=pytest.mark.slow) for how in (*STATES, "keep")),
    ],
    ids=str,
)
def test_a_process_killed_at_any_moment_resumes_from_a_whole_checkpoint_to_the_same_weights(
    kills: int, how: str, tmp_path: Path
) -> None:
    """In forward, backward, updates, writes to homes and saves; also in a home that is kept."""
    code = "import sys; from tests.offload.checkpoint_worker import main; main(*sys.argv[1:])"
    done = run_program(code, tmp_path, kills, how, seconds=600)
    assert done.status == 0, done.errors
    outcome = json.loads(done.output)
    assert sum(outcome["killed"].values()) == kills
    assert len(outcome["killed"]) >= min(kills, 7), outcome
    assert outcome["agreed"] == outcome["rounds"], outcome


# --- the folder -------------------------------------------------------------------------------------------------------


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def saved_in(folder: Path) -> set[str]:
    """The names of the last save of a model."""
    save = json.loads((folder / INDEX).read_text())["metadata"][SAVE]
    return {f"model-{save}-00001-of-00001.safetensors", f"state-{save}", f"state-{save}/state.pt"}


def test_what_is_the_users_stays(tmp_path: Path) -> None:
    """Also in a folder of ours, and in folders and files that are called nearly like ours."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "state.pt").write_text("mine")
    folder, id = tmp_path / "c", "0" * 32
    own = ["state-1/state.pt", "index-3.json", "model-2-00001-of-00001.safetensors", f"state-x{id}/a", f"model-{id}"]
    own += [f"state-{id}/thesis.txt"]
    for name in own:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / f"state-{'1' * 32}").symlink_to(tmp_path / "outside")
    before = names_in(folder)
    layers = build(["linear"])
    save_checkpoint(folder, layers)
    first = next(name for name in saved_in(folder) if name.endswith("state.pt"))
    shutil.copytree((folder / first).parent, folder / "best")
    (folder / first).with_name("notes.txt").write_text("mine")
    save_checkpoint(folder, layers)
    save_checkpoint(folder, layers)
    state = first.removesuffix("/state.pt")
    left = before | {"best", "best/state.pt", state, f"{state}/notes.txt"}
    assert names_in(folder) == left | {INDEX} | saved_in(folder)
    assert all((folder / name).read_text() == "mine" for name in own)
    assert (tmp_path / "outside" / "state.pt").read_text() == "mine"
    load_checkpoint(folder, layers)


def test_one_save_at_a_time_writes_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process, which a handler of a signal may interrupt by a save, and in others."""
    layers = build(["linear"])
    save_checkpoint(tmp_path / "c", layers)
    replace, code = os.replace, "import sys; from tests.offload.files.test_checkpoint import *\n"
    code += "save_checkpoint(sys.argv[1], build(['linear']))"
    refused: list[str] = []

    def meanwhile(*args: Any) -> None:
        before = names_in(tmp_path / "c")
        with pytest.raises(
            ValueError, match=r"no other save writes, got .*/c, to which one of this process or of"
        ) as e:
            save_checkpoint(tmp_path / "c", layers)
        refused.append(str(e.value))
        refused.append(run_program(code, tmp_path / "c").errors)
        assert names_in(tmp_path / "c") == before
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", meanwhile)
        save_checkpoint(tmp_path / "c", layers)
    assert [text.count("no other save writes") for text in refused] == [1, 1]
    save_checkpoint(tmp_path / "c", layers)
    load_checkpoint(tmp_path / "c", layers)


PRETRAINED = json.dumps({"weight_map": {"0.weight": "model-00001-of-00001.safetensors"}})
NO_INDEX: dict[str, Callable[[Path], object]] = {
    "pretrained": lambda path: path.write_text(PRETRAINED),
    "damaged": lambda path: path.write_text("{"),
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a loop of links": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", NO_INDEX)
def test_an_index_that_is_not_of_a_checkpoint_is_not_replaced(tmp_path: Path, kind: str) -> None:
    layers = build(["linear"])
    NO_INDEX[kind](tmp_path / INDEX)
    mode = (tmp_path / INDEX).lstat()
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    with pytest.raises(ValueError, match=r"nothing was changed.*ass another folder"):
        save_checkpoint(tmp_path, layers)
    assert names_in(tmp_path) == {INDEX, "model-00001-of-00001.safetensors"}
    assert (tmp_path / INDEX).lstat() == mode


def test_a_save_beside_training_sums_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that trains changes the weights between the sum and the write of a window."""
    layers = nn.Linear(600, 600)
    crc32 = zlib.crc32

    def changed(data: Any, value: int = 0) -> int:
        found = crc32(data, value)
        with torch.no_grad():
            layers.weight.add_(1.0)
            layers.bias.add_(1.0)
        return found

    monkeypatch.setattr("offload.untrusted.zlib.crc32", changed)
    save_checkpoint(tmp_path, layers)
    monkeypatch.undo()
    load_checkpoint(tmp_path, nn.Linear(600, 600))


ACTIONS = ("open", "write", "fsync", "replace", "mkdir")


def test_each_of_many_faults_names_its_file_and_leaves_the_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the n-th call of an action, for every action and n; nothing is left, and the next save works."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    folder = tmp_path / "c"
    save_checkpoint(folder, layers, optimizer, extra=1, file_bytes=300)
    calls, fatal = collections.Counter[str](), ("", 0)
    originals = {action: getattr(os, action) for action in ACTIONS} | {"fsync": lambda fd: None}  # it takes long

    def counted(action: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[action] += 1
            if (action, calls[action]) == fatal:
                names = [] if isinstance(args[0], int) else [os.fspath(args[0])]  # as the system's errors do
                raise OSError(errno.EIO, "Input/output error", *names)
            return originals[action](*args, **kwargs)

        return call

    for action in ACTIONS:
        monkeypatch.setattr(os, action, counted(action))
    save_checkpoint(folder, layers, optimizer, extra=1, file_bytes=300)
    faults = [(action, n) for action, total in calls.items() for n in range(1, total + 1)]
    assert {action for action, _ in faults} == set(ACTIONS)
    assert len(faults) >= 80
    before = names_in(folder)
    for fault in faults:
        calls.clear()
        fatal, error = fault, ""
        try:
            save_checkpoint(folder, layers, optimizer, extra=2, file_bytes=300)
        except OSError as raised:
            error = str(raised)
        fatal = ("", 0)
        found = load_checkpoint(folder, layers, optimizer).extra
        assert not error or str(folder) in error, (fault, error)
        assert error or found == 2, fault  # what could not be removed is removed by the next save
        assert found == 2 or names_in(folder) == before, fault
        save_checkpoint(folder, layers, optimizer, extra=1, file_bytes=300)
        assert len(names_in(folder)) == len(before), fault
        before = names_in(folder)
