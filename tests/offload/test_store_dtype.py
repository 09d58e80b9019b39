"""Weights stored in fewer bytes: the arithmetic of a plain model with rounded weights, in any home and checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offload.optim.update_blocks
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.streaming.weight_forms import noise

FORMS: list[Any] = ["split", torch.bfloat16]
forms = pytest.mark.parametrize("form", FORMS, ids=["split", "bfloat16"])

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": False}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    # Multiples of 8: kernels round alike wherever a row begins.
    parts = [nn.Linear(72, 72), nn.Tanh(), nn.LayerNorm(72), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 80)]
    return nn.Sequential(*parts)


def bits(values: Tensor) -> np.ndarray[Any, Any]:
    return values.detach().contiguous().numpy().view(np.uint32).astype(np.uint64)


def of_bits(found: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy((found & 0xFFFFFFFF).astype(np.uint32).view(np.float32).copy())


def nearest(values: Tensor) -> Tensor:
    """The nearest bfloat16 as float32, ties away from zero."""
    return of_bits((bits(values) + 0x8000) & 0xFFFF0000)


def stochastic(values: Tensor, step: int, name: str) -> Tensor:
    added = noise(step, name, 0, values.numel()).numpy().astype(np.uint64).reshape(values.shape)
    return of_bits((bits(values) + added) & 0xFFFF0000)


class Twins:
    """A plain model that rounds its weights, and the same offloaded with ``store_dtype=form``."""

    def __init__(self, name: str, home: str, form: Any, *, max_norm: float | None = None, **more: Any) -> None:
        kind, arguments = CLASSES[name]
        self.form, self.max_norm = form, max_norm
        self.bare = layers()
        self.model = OffloadModel(
            copy.deepcopy(self.bare),
            "cpu",
            home,
            num_slices=6,
            memory=MemoryPolicy.fixed(slots=2),
            store_dtype=form,
            param_dtype=more.pop("param_dtype", None),
        )
        self.ours = OffloadOptimizer(self.model, kind, max_norm=max_norm, **arguments, **more)
        if form is torch.bfloat16:
            with torch.no_grad():
                for p in self.bare.parameters():
                    p.copy_(p.bfloat16())
        self.plain = kind(self.bare.parameters(), **arguments)
        self.count = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.count += 1
            x = torch.randn(8, 72, generator=torch.Generator().manual_seed(self.count))
            masters = [p.detach().clone() for p in self.bare.parameters()]
            with torch.no_grad():
                for p in self.bare.parameters():
                    p.copy_(nearest(p))
            self.bare(x).pow(2).mean().backward()
            self.model(x).pow(2).mean().backward()
            with torch.no_grad():
                for p, master in zip(self.bare.parameters(), masters, strict=True):
                    p.copy_(master)
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.max_norm, foreach=False)
            self.plain.step()
            if self.form is torch.bfloat16:
                with torch.no_grad():
                    for name, p in self.bare.named_parameters():
                        p.copy_(stochastic(p, self.count, name))
            self.plain.zero_grad()
            self.ours.step()
            self.ours.zero_grad()

    def compare(self) -> None:
        found = self.model.state_dict()
        for name, value in self.bare.state_dict().items():
            assert found[name].dtype == (torch.float32 if self.form == "split" else torch.bfloat16)
            assert torch.equal(found[name].float(), value), name
        for p, q in zip(self.bare.parameters(), self.model.parameters(), strict=True):
            assert q.dtype == torch.bfloat16
            assert torch.equal(q.float(), nearest(p))
        expected, actual = self.plain.state_dict()["state"], self.ours.state_dict()["state"]
        assert expected.keys() == actual.keys()
        for key, state in expected.items():
            assert state.keys() == actual[key].keys()
            for name, value in state.items():
                assert torch.equal(torch.as_tensor(actual[key][name]), torch.as_tensor(value)), name


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", 4096)


@forms
@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.usefixtures("small_blocks")
def test_training_is_that_of_a_plain_model_with_rounded_weights(home: str, name: str, form: Any) -> None:
    twins = Twins(name, home, form)
    twins.step(3)
    twins.compare()


@forms
@pytest.mark.usefixtures("small_blocks")
def test_clipping_updates_in_backward_and_shards_in_memory_change_no_bit(tmp_path: Path, form: Any) -> None:
    twins = Twins("adamw", f"{tmp_path}/", form, update_in_backward=True)
    twins.step()
    for shards in ([], [0, 2], [1, 2, 3, 4, 5]):
        twins.model._executor.keep_in_memory(shards)
        twins.step()
        twins.compare()


@forms
def test_bits_do_not_depend_on_how_updates_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setattr(offload.optim.state_forms, "PIECE", 512)
    found = []
    for update_block_bytes in (64, 4096, 16 << 20):
        monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", update_block_bytes)
        twins = Twins("adamw", f"{tmp_path}/{update_block_bytes}/", form, max_norm=0.1, states="8bit")
        twins.step(3)
        states = (v for state in twins.ours.state_dict()["state"].values() for v in state.values())
        found.append([*twins.model.state_dict().values(), *map(torch.as_tensor, states)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@forms
@pytest.mark.parametrize("through", ["checkpoint", "state_dict"])
@pytest.mark.usefixtures("small_blocks")
def test_a_resumed_run_continues_bit_for_bit(home: str, tmp_path: Path, form: Any, through: str) -> None:
    first = Twins("adamw", f"{home}a/" if home != "cpu" else home, form, max_norm=0.1)
    first.step(2)
    second = Twins("adamw", f"{home}b/" if home != "cpu" else home, form, max_norm=0.1)
    if through == "checkpoint":
        save_checkpoint(tmp_path / "saved", first.model, first.ours)
        load_checkpoint(tmp_path / "saved", second.model, second.ours)
    else:
        torch.save([first.model.state_dict(), first.ours.state_dict()], tmp_path / "saved.pt")
        model, optimizer = torch.load(tmp_path / "saved.pt")
        second.model.load_state_dict(model)
        second.ours.load_state_dict(optimizer)
    second.bare, second.plain, second.count = first.bare, first.plain, first.count
    second.compare()
    second.step(2)
    second.compare()


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("form", "states", "moved"),
    [
        ("split", None, 34),
        (torch.bfloat16, None, 30),
        ("split", "8bit", 22 + 4 / 64),
        (torch.bfloat16, "8bit", 18 + 4 / 64),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_a_step_of_adam_with_clipping_moves_so_many_bytes_a_parameter(
    tmp_path: Path, form: Any, states: Any, moved: float, param_dtype: Any
) -> None:
    """Of matrices; and without what the slots keep between the passes."""
    model = OffloadModel(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5))),
        "cpu",
        f"{tmp_path}/",
        num_slices=5,
        memory=MemoryPolicy.fixed(slots=2),
        store_dtype=form,
        param_dtype=param_dtype,
    )
    optimizer = OffloadOptimizer(model, torch.optim.Adam, states=states, max_norm=0.1)
    for _ in range(3):
        before = model.statistics()
        model(torch.ones(2, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.statistics()
    names = ("bytes_loaded", "bytes_stored", "update_bytes_read", "update_bytes_written")
    total = sum(getattr(after, name) - getattr(before, name) for name in names)
    # Two shards are still in their slots when backward begins.
    assert total == (5 * moved - 2 * 2) * 64 * 64
