"""States of fewer bytes: the arithmetic of the class with rounded states, in any home, cut and checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.optim.update_blocks
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.optim.dynamic_map import decode, encode
from offload.optim.state_forms import in_full
from tests.offload.twins import CLASSES, Twins, exchanged, folder_in, layers, resumed

FORMS: list[Any] = [torch.bfloat16, "8bit"]
forms = pytest.mark.parametrize("form", FORMS, ids=["bfloat16", "8bit"])


def rounded(value: Tensor, form: Any) -> Tensor:
    """What a state is after it was stored."""
    if form is torch.bfloat16:
        return value.bfloat16().to(value.dtype)
    flat, found = value.reshape(-1), torch.empty(value.numel(), dtype=value.dtype)
    codes, scales = torch.empty(flat.numel(), dtype=torch.uint8), torch.empty(-(-flat.numel() // 256))
    encode(flat, codes, scales)
    decode(codes, scales, found)
    return found.view(value.shape)


class RoundedStates(Twins):
    """A plain model whose states are rounded after each step, and the same offloaded with ``states=form``."""

    def __init__(
        self, name: str, home: str, form: Any, *, slots: int = 2, resident: str | None = None, **more: Any
    ) -> None:
        kind, arguments = CLASSES[name]
        self.form = form
        self.bare = layers()
        policy = MemoryPolicy.fixed(slots=slots)
        given: dict[str, Any] = {"num_slices": 6, "memory": policy, "resident": resident}
        self.model = OffloadModel(copy.deepcopy(self.bare), "cpu", home, **given)
        self.plain = kind(self.bare.parameters(), **arguments)
        self.ours = OffloadOptimizer(self.model, kind, states=form, **arguments, **more)
        self.round()

    def round(self) -> None:
        for p, state in self.plain.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and p.dim() > 1 and value.shape == p.shape:
                    value.copy_(rounded(value, self.form))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            x = self.batch()
            for run, optimizer in ((self.bare, self.plain), (self.model, self.ours)):
                (run(x) - 1).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                self.round()

    def assert_equal(self) -> None:
        for (name, p), q in zip(self.bare.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(p, q), name
        expected, actual = self.plain.state_dict()["state"], self.ours.state_dict()["state"]
        assert expected.keys() == actual.keys()
        for key, p in enumerate(self.bare.parameters()):
            full = in_full(actual[key], p.detach())
            assert full.keys() == expected[key].keys()
            for name, value in expected[key].items():
                assert torch.equal(torch.as_tensor(full[name]), torch.as_tensor(value)), name


@forms
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("adagrad", "disk"),
        ("adamw", "disk"),
        ("momentum", "disk"),
        ("rmsprop", "disk"),
        ("adamw", "host"),
        ("rmsprop", "host"),
    ],
    indirect=["home"],
)
@pytest.mark.usefixtures("small_blocks")
def test_training_is_that_of_the_class_with_states_rounded_after_each_step(home: str, name: str, form: Any) -> None:
    twins = RoundedStates(name, home, form)
    twins.step(3)
    twins.assert_equal()


@forms
def test_parameters_that_stay_on_the_device_store_states_in_the_form(tmp_path: Path, form: Any) -> None:
    twins = RoundedStates("adamw", f"{tmp_path}/a/", form, resident="3.*", max_norm=1e9)
    twins.step(2)
    twins.assert_equal()
    saved = twins.ours.state_dict()
    each = sum(value.nbytes for key, value in saved["state"][4].items() if key != "step")  # of 3.weight
    assert each == 72 * 72 * 4 if form is torch.bfloat16 else 2 * (72 * 72 + 4 * 21)
    other = RoundedStates("adamw", f"{tmp_path}/b/", form, resident="3.*", max_norm=1e9)
    other.model.load_state_dict(twins.model.state_dict())
    other.ours.load_state_dict(copy.deepcopy(saved))
    other.take_over(twins)
    other.model.get_parameter("3.weight").data = other.model.get_parameter("3.weight").data.clone()
    other.step()
    other.assert_equal()


@forms
@pytest.mark.usefixtures("small_blocks")
def test_updates_in_backward_and_shards_in_memory_round_alike(tmp_path: Path, form: Any) -> None:
    RoundedStates("adamw", f"{tmp_path}/", form, update_in_backward=True).assert_equal_where_shards_move()


@forms
def test_bits_do_not_depend_on_how_updates_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setattr("offload.streaming.weight_forms.PIECE", 512)
    found = []
    for update_block_bytes in (64, 4096, 16 << 20):
        monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", update_block_bytes)
        twins = RoundedStates("adamw", f"{tmp_path}/{update_block_bytes}/", form, max_norm=0.1)
        twins.step(2)
        found.append([*twins.model.parameters(), *_tensors(twins.ours)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [torch.as_tensor(v) for state in optimizer.state_dict()["state"].values() for v in state.values()]


@forms
def test_norms_biases_and_small_matrices_keep_states_in_full(home: str, form: Any) -> None:
    model = OffloadModel(nn.Sequential(nn.Linear(64, 63), nn.LayerNorm(63), nn.Linear(63, 66)), "cpu", home)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, states=form)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    kept = {0, 1, 2, 3, 5}  # 64 x 63 is less than 4,096
    for number, state in optimizer.state_dict()["state"].items():
        assert ("exp_avg" in state and state["exp_avg"].dtype == torch.float32) == (number in kept)
    last = optimizer.state_dict()["state"][4]
    if form == "8bit":
        assert {k: (v.dtype, tuple(v.shape)) for k, v in last.items() if k != "step"} == {
            "exp_avg:8bit": (torch.uint8, (66, 63)),
            "exp_avg:scales": (torch.float32, (17,)),
            "exp_avg_sq:8bit": (torch.uint8, (66, 63)),
            "exp_avg_sq:scales": (torch.float32, (17,)),
        }
    else:
        assert last["exp_avg"].dtype == last["exp_avg_sq"].dtype == torch.bfloat16


@resumed(FORMS)
@pytest.mark.usefixtures("small_blocks")
def test_a_resumed_run_continues_bit_for_bit(home: str, tmp_path: Path, form: Any, through: str) -> None:
    first, second = (RoundedStates("adamw", folder_in(home, name), form) for name in "ab")
    first.step(2)
    second.assert_resumes(first, through, tmp_path)


@exchanged(FORMS)
def test_a_checkpoint_of_one_form_loads_into_another(home: str, tmp_path: Path, there: Any, here: Any) -> None:
    first = RoundedStates("adamw", folder_in(home, "a"), here or "8bit")
    if here is None:
        first.ours = OffloadOptimizer(first.model, torch.optim.AdamW)
    first.step(2)
    second = RoundedStates("adamw", folder_in(home, "b"), there or "8bit")
    if there is None:
        second.ours = OffloadOptimizer(second.model, torch.optim.AdamW)
    save_checkpoint(tmp_path / "saved", first.model, first.ours)
    load_checkpoint(tmp_path / "saved", second.model, second.ours)
    saved, loaded = first.ours.state_dict()["state"], second.ours.state_dict()["state"]
    for number, p in enumerate(layers().parameters()):
        expected, actual = in_full(saved[number], p.detach()), in_full(loaded[number], p.detach())
        for name, value in expected.items():
            if there is not None and there != here and p.dim() > 1 and name != "step":
                value = rounded(value, there)
            assert torch.equal(actual[name], value)


def test_states_that_do_not_belong_together_are_refused_and_change_nothing() -> None:
    twins = RoundedStates("adamw", "cpu", "8bit")
    twins.step()
    saved = twins.ours.state_dict()
    for key, value, match in (
        ("exp_avg:scales", None, "got torch.uint8 in shape .72, 72. and None"),
        ("exp_avg:scales", torch.ones(3), "in shape .21,., got .* in shape .3,."),
        ("exp_avg:8bit", torch.ones(72, 72), "of uint8 in shape .72, 72. .*, got torch.float32"),
    ):
        damaged = {number: dict(state) for number, state in saved["state"].items()}
        if value is None:
            del damaged[0][key]
        else:
            damaged[0][key] = value
        with pytest.raises(ValueError, match=match):
            twins.ours.load_state_dict({**saved, "state": damaged})
    twins.assert_equal()


def test_an_optimizer_of_torch_refuses_states_in_8_bits() -> None:
    twins = RoundedStates("adamw", "cpu", "8bit")
    twins.step()
    twins.plain.load_state_dict(copy.deepcopy(twins.ours.state_dict()))
    twins.bare(torch.ones(1, 72)).sum().backward()
    with pytest.raises(KeyError, match="exp_avg"):
        twins.plain.step()


def test_a_scale_of_a_scaler_clipping_and_groups_reach_decoded_states(home: str) -> None:
    """As without a scaler, whose powers of two change no bit."""
    found = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = OffloadModel(layers(), "cpu", f"{home}{scaled}/" if home != "cpu" else home)
        groups = [{"params": "*bias", "weight_decay": 0.0, "lr": 0.003}, {"params": "*"}]
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, states="8bit", params=groups, max_norm=0.05, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=scaled)
        for k in range(3):
            loss = model(torch.full((2, 72), float(k))).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([p.clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"states": "4bit"}, ValueError, "expected None .*, torch.bfloat16 or '8bit', got states='4bit'"),
        ({"states": torch.float16}, ValueError, "got states=torch.float16"),
        ({"states": 8}, TypeError, "got int .states=8."),
        ({"optimizer_class": torch.optim.Adafactor, "states": "8bit"}, TypeError, "Adafactor updates a matrix diff"),
        ({"optimizer_class": torch.optim.SparseAdam, "states": "8bit"}, TypeError, "SparseAdam cannot be tried"),
    ],
)
def test_what_cannot_be_stored_so_is_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = OffloadModel(layers(), "cpu")
    with pytest.raises(error, match=match):
        OffloadOptimizer(model, **{"optimizer_class": torch.optim.Adam, **arguments})


def test_a_sparse_gradient_of_an_encoded_state_is_refused_in_step(home: str) -> None:
    table = nn.Embedding(200, 64, sparse=True)
    model = OffloadModel(nn.Sequential(table, nn.Linear(64, 64)), "cpu", home)
    optimizer = OffloadOptimizer(model, torch.optim.Adagrad, states="8bit")
    model(torch.tensor([1, 2])).sum().backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
