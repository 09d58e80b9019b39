"""Weights, gradients and states in fewer bytes: the numbers of a plain model that rounds them, wherever they rest."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offload.optim.update_blocks
import offload.streaming.grad_norm
from offload import (
    DiskHome,
    MemoryPolicy,
    OffloadModel,
    OffloadOptimizer,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
)
from offload.forms.weight_forms import noise, weight_form_of
from offload.optim.dynamic_map import BLOCK, decode, encode, levels
from offload.optim.state_forms import in_full
from offload.streaming.grad_norm import norm_of
from tests.offload import side_by_side
from tests.offload.pair import CLASSES
from tests.offload.side_by_side import advance, drawn

BF16 = torch.bfloat16
#: One kernel for tensors of all sizes.
KERNELS: dict[str, dict[str, bool]] = {"adamw": {"fused": True}, "adagrad": {"fused": False}}
#: ``store_dtype``, ``gradient_dtype``, ``states``.
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "split weights": ("split", None, None),
    "bfloat16 weights": (BF16, None, None),
    "bfloat16 gradients": (None, BF16, None),
    "bfloat16 states": (None, None, BF16),
    "8-bit states": (None, None, "8bit"),
    "everything": (BF16, BF16, "8bit"),
}
forms = pytest.mark.parametrize("form", FORMS)
weight_forms = pytest.mark.parametrize("weights", ["split", BF16], ids=str)


def layers(device: str = "cpu", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    # Multiples of 8: kernels round alike wherever a row begins. Not of 16: the last scale is of fewer elements.
    with torch.device(device):
        parts = [nn.Linear(72, 72), nn.Tanh(), nn.LayerNorm(72), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 80)]
        return nn.Sequential(*parts)


def batch(k: int) -> Tensor:
    return drawn(k, 8, 72)


def folder_in(home: str, name: str) -> str:
    """A home of its own for one of several models of a test."""
    return home if home == "cpu" else f"{home}{name}/"


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


def rounded_state(value: Tensor, form: Any) -> Tensor:
    """What a state is after it was stored."""
    if form is BF16:
        return value.bfloat16().to(value.dtype)
    flat, found = value.reshape(-1), torch.empty(value.numel(), dtype=value.dtype)
    codes, scales = torch.empty(flat.numel(), dtype=torch.uint8), torch.empty(-(-flat.numel() // 256))
    encode(flat, codes, scales)
    decode(codes, scales, found)
    return found.view(value.shape)


class Twins:
    """A plain model that rounds as ours stores, and the same offloaded; both take the same steps."""

    def __init__(
        self, form: str, home: str, name: str = "adamw", *, max_norm: float | None = None, **more: Any
    ) -> None:
        kind, arguments = CLASSES[name]
        arguments = arguments | KERNELS.get(name, {"foreach": False})
        self.weights, self.gradients, self.states = FORMS[form]
        self.max_norm, self.count = max_norm, 0
        self.bare = layers()
        how: dict[str, Any] = {"num_slices": 6, "memory": MemoryPolicy.fixed(slots=2, gradient_bytes=30_000)}
        how |= {"store_dtype": self.weights, "gradient_dtype": self.gradients}
        how |= {key: more.pop(key) for key in ("resident", "checkpoint_activation") if key in more}
        self.model = OffloadModel(copy.deepcopy(self.bare), "cpu", home, **how)
        self.ours = OffloadOptimizer(self.model, kind, max_norm=max_norm, states=self.states, **arguments, **more)
        if self.weights is BF16:
            with torch.no_grad():
                for p in self.bare.parameters():
                    p.copy_(p.bfloat16())
        self.plain = kind(self.bare.parameters(), **arguments)
        self.round_states()

    def backward(self) -> None:
        """Of both; the plain one computes with rounded weights."""
        self.count += 1
        masters = [p.detach().clone() for p in self.bare.parameters()]
        with torch.no_grad():
            for p in self.bare.parameters() if self.weights else ():
                p.copy_(nearest(p))
        for run in (self.bare, self.model):
            (run(batch(self.count)) - 1).pow(2).mean().backward()
        with torch.no_grad():
            for p, master in zip(self.bare.parameters(), masters, strict=True):
                p.copy_(master)

    def step(self, times: int = 1, *, between: Callable[[], object] = lambda: None) -> None:
        for _ in range(times):
            self.backward()
            self.round_gradients()
            between()
            self.plain.step()
            with torch.no_grad():
                for name, p in self.bare.named_parameters() if self.weights is BF16 else ():
                    p.copy_(stochastic(p, self.count, name))
                self.round_states()
            advance(self.ours)
            self.plain.zero_grad()

    def round_gradients(self) -> None:
        members = [*self.bare.parameters()]
        if self.gradients is None:
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(members, self.max_norm, foreach=False)
            return
        stored = [p.grad.to(BF16) for p in members]
        for p, q, rounded in zip(members, self.model.parameters(), stored, strict=True):
            assert q.grad.dtype == BF16
            assert torch.equal(q.grad, rounded)
            p.grad = rounded.float()
        if self.max_norm is not None:
            total = torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in stored]))
            for p in members:
                p.grad.mul_(torch.clamp(self.max_norm / (total + 1e-6), max=1.0))

    def round_states(self) -> None:
        for p, state in self.plain.state.items():
            for value in state.values():
                if self.states and isinstance(value, Tensor) and p.dim() > 1 and value.shape == p.shape:
                    value.copy_(rounded_state(value, self.states))

    def assert_equal(self) -> None:
        """Weights and states, bit by bit."""
        found = self.model.state_dict()
        for name, value in self.bare.state_dict().items():
            assert found[name].dtype == (BF16 if self.weights is BF16 else torch.float32)
            assert torch.equal(found[name].float(), value), name
        for p, q in zip(self.bare.parameters(), self.model.parameters(), strict=True):
            assert torch.equal(q.float(), nearest(p) if self.weights else p)
        expected, actual = self.plain.state_dict()["state"], self.ours.state_dict()["state"]
        assert expected.keys() == actual.keys()
        for key, p in enumerate(self.bare.parameters()):
            full = in_full(actual[key], p.detach())
            assert full.keys() == expected[key].keys()
            for name, value in expected[key].items():
                assert torch.equal(torch.as_tensor(full[name]), torch.as_tensor(value)), name

    def stored(self) -> list[Tensor]:
        states = (v for state in self.ours.state_dict()["state"].values() for v in state.values())
        return [value.clone() for value in (*self.model.state_dict().values(), *map(torch.as_tensor, states))]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix is updated, and its gradient rounded and stored, in several parts."""
    monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", 4096)
    monkeypatch.setattr(offload.streaming.grad_norm, "PIECE", 1000)


# --- training ---------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(
    ("name", "max_norm", "home"),
    [
        ("adamw", None, "host"),
        ("adamw", 0.3, "disk"),
        ("momentum", None, "disk"),
        ("rmsprop", None, "disk"),
        ("adagrad", None, "host"),
        ("adafactor", None, "disk"),
    ],
    indirect=["home"],
)
def test_training_is_that_of_a_plain_model_that_rounds(form: str, name: str, max_norm: float | None, home: str) -> None:
    if name == "adafactor" and FORMS[form][2] is not None:
        with pytest.raises(TypeError, match="Adafactor updates a matrix diff"):
            Twins(form, home, name)
        return
    twins = Twins(form, home, name, max_norm=max_norm)
    twins.step(3)
    twins.assert_equal()


@forms
def test_updates_in_backward_and_shards_that_move_between_backward_and_step_change_no_bit(
    form: str, tmp_path: Path
) -> None:
    gradients = FORMS[form][1]
    twins = Twins(form, f"{tmp_path}/", checkpoint_activation=True, update_in_backward=gradients is None)
    twins.step()
    for shards in ([], [0, 3], [3, 5], []):
        twins.step(between=lambda shards=shards: twins.model._homes.keep_in_memory(shards))  # type: ignore[misc]
        twins.assert_equal()


@weight_forms
def test_weights_that_compute_in_the_type_in_which_they_rest_in_memory_train_as_those_that_stream(
    weights: Any, tmp_path: Path
) -> None:
    found = list[OffloadModel]()
    for place, memory in ((f"{tmp_path}/", None), (f"{tmp_path}/rests", "64MiB")):
        how: dict[str, Any] = {"checkpoint_activation": True} if memory is None else {"memory": memory}
        model = OffloadModel(layers(), "cpu", place, store_dtype=weights, param_dtype=BF16, **how)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, fused=True)
        for k in range(5):
            model(batch(k)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
    assert any(shard.in_place for shard in found[1]._homes.shards)
    side_by_side.assert_equal(*found)


@forms
@pytest.mark.parametrize(("through", "home"), [("checkpoint", "disk"), ("state_dict", "host")], indirect=["home"])
def test_a_resumed_run_continues_bit_for_bit(form: str, through: str, home: str, tmp_path: Path) -> None:
    first, second = (Twins(form, folder_in(home, name), max_norm=0.3) for name in "ab")
    first.step(2)
    if through == "checkpoint":
        save_checkpoint(tmp_path / "saved", first.model, first.ours)
        load_checkpoint(tmp_path / "saved", second.model, second.ours)
    else:
        torch.save([first.model.state_dict(), first.ours.state_dict()], tmp_path / "saved.pt")
        model, optimizer = torch.load(tmp_path / "saved.pt")
        second.model.load_state_dict(model)
        second.ours.load_state_dict(optimizer)
    second.bare, second.plain, second.count = first.bare, first.plain, first.count
    second.assert_equal()
    second.step(2)
    second.assert_equal()


@pytest.mark.parametrize(
    ("weights", "states", "param_dtype", "gradients", "moved"),
    [
        (None, None, None, None, 36),
        (None, BF16, None, None, 28),
        (None, "8bit", None, BF16, 20 + 4 / 64),
        ("split", None, None, BF16, 30),
        (BF16, None, BF16, None, 30),
        ("split", "8bit", BF16, None, 22 + 4 / 64),
        (BF16, "8bit", None, BF16, 14 + 4 / 64),
    ],
    ids=str,
)
def test_a_step_of_adam_with_clipping_moves_so_many_bytes_a_parameter(
    tmp_path: Path, weights: Any, states: Any, moved: float, param_dtype: Any, gradients: Any
) -> None:
    """Of matrices of 64 x 64, each a shard; and without what the slots keep between the passes."""
    matrices = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    how: dict[str, Any] = {"store_dtype": weights, "param_dtype": param_dtype, "gradient_dtype": gradients}
    model = OffloadModel(matrices, "cpu", tmp_path, num_slices=5, memory=MemoryPolicy.fixed(slots=2), **how)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, states=states, max_norm=0.1)
    for _ in range(3):
        before = model.statistics().bytes_moved
        model(torch.ones(2, 64)).pow(2).mean().backward()
        advance(optimizer)
    s = model.statistics()
    # Two shards are still in their slots when backward begins.
    assert s.bytes_moved - before == (5 * moved - 2 * (2 if weights else 4)) * 64 * 64
    assert s.bytes_moved == s.bytes_loaded + s.bytes_stored + s.update_bytes_read + s.update_bytes_written


# --- the roundings ----------------------------------------------------------------------------------------------------


def test_a_split_value_is_restored_bit_by_bit_from_its_nearest_bfloat16_and_the_rest() -> None:
    form = weight_form_of("split")
    assert form is not None
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    values = of_bits(np.concatenate([drawn, np.array(edges + [e + (1 << 31) for e in edges], dtype=np.uint64)]))
    upper, lower = torch.empty(values.shape, dtype=BF16), torch.empty(values.shape, dtype=torch.int16)
    form.encode(values, upper, lower)
    found = torch.empty_like(values)
    form.decode(upper, lower, found)
    number = ~values.isnan()
    assert torch.equal(found[number].view(torch.int32), values[number].view(torch.int32))
    assert bool(found[~number].isnan().all())
    assert bool(upper[~number].isnan().all())


def test_stochastic_rounding_is_between_neighbours_exact_on_average_and_another_in_each_step() -> None:
    form = weight_form_of(BF16)
    assert form is not None
    count = 100_000
    value = torch.tensor(1.0 + 0.3 / 128)  # between 1 and 1 + 1 / 128
    rounded = []
    for step, name in ((1, "a"), (2, "a"), (1, "b")):
        upper = torch.empty(count, dtype=BF16)
        form.store(value.repeat(count), upper, None, step=step, name=name, begin=0)
        rounded.append(upper.double())
        assert set(upper.unique().tolist()) == {1.0, 1.0 + 1 / 128}
        assert abs(float(rounded[-1].mean() - 1) * 128 - 0.3) < 4 * (0.21 / count) ** 0.5
    for one, other in itertools.combinations(rounded, 2):
        both = float(((one > 1) & (other > 1)).double().mean())
        assert abs(both - 0.09) < 4 * (0.09 / count) ** 0.5  # independent
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1.5])
    upper = torch.empty(5, dtype=BF16)
    form.store(special.clone(), upper, None, step=1, name="a", begin=0)
    torch.testing.assert_close(upper.float(), special, rtol=0, atol=0, equal_nan=True)


# --- values from elsewhere --------------------------------------------------------------------------------------------

Made = tuple[OffloadModel, OffloadOptimizer]


def made(bare: nn.Sequential, home: Any, form: str | None, **more: Any) -> Made:
    weights, gradients, states = FORMS[form] if form else (None, None, None)
    model = OffloadModel(bare, "cpu", home, 2, store_dtype=weights, gradient_dtype=gradients, **more)
    return model, OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, states=states)


def train(model: OffloadModel, optimizer: OffloadOptimizer) -> list[Tensor]:
    """Weights and states after two steps."""
    side_by_side.train(model, optimizer, map(batch, range(2)))
    states = (v for state in optimizer.state_dict()["state"].values() for v in state.values())
    return [value.clone() for value in (*model.state_dict().values(), *map(torch.as_tensor, states))]


def kept(folder: Path, form: str) -> Made:
    made(layers(), DiskHome(folder / "kept", keep=True), None)[0].close()
    return made(layers("meta"), DiskHome(folder / "kept", keep=True), form)


def pretrained(folder: Path, form: str) -> Made:
    return made(layers("meta"), f"{folder}/home/", form, pretrained=folder / "saved")


def initialised(folder: Path, form: str) -> Made:
    bare = layers("meta")
    torch.manual_seed(0)
    return made(bare, f"{folder}/home/", form)


def loaded(folder: Path, form: str) -> Made:
    model, optimizer = made(layers(seed=1), f"{folder}/home/", form)
    load_pretrained(model, folder / "saved")
    return model, optimizer


@forms
@pytest.mark.parametrize("source", [kept, pretrained, initialised, loaded], ids=lambda each: each.__name__)
def test_values_from_elsewhere_train_as_those_of_the_layers_or_are_refused(
    tmp_path: Path, source: Callable[[Path, str], Made], form: str
) -> None:
    save_checkpoint(tmp_path / "saved", *made(layers(), "cpu", None))
    if source is kept and FORMS[form][0]:
        with pytest.raises(ValueError, match=r"expected DiskHome.keep=False."):
            source(tmp_path, form)
        model, _ = made(layers("meta"), DiskHome(tmp_path / "kept", keep=True), None)  # and it is as it was
        assert all(map(torch.equal, model.parameters(), layers().parameters()))
        model.close()
        return
    found, expected = source(tmp_path, form), made(layers(), "cpu", form)
    assert all(map(torch.equal, train(*found), train(*expected)))
    found[0].close()


@pytest.mark.parametrize(("here", "there"), [*itertools.permutations([None, *FORMS], 2)])
def test_a_checkpoint_of_one_form_loads_into_another_or_is_refused(
    tmp_path: Path, here: str | None, there: str | None
) -> None:
    model, optimizer = made(layers(), f"{tmp_path}/a/", here)
    train(model, optimizer)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    other, resumed = made(layers(seed=1), f"{tmp_path}/b/", there)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    (from_weights, _, _), (weights, _, states) = (FORMS[each] if each else (None,) * 3 for each in (here, there))
    if weights is BF16 and from_weights is not BF16:
        with pytest.raises(ValueError, match=r"would lose digits as torch.bfloat16"):
            load_checkpoint(tmp_path / "saved", other, resumed)
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        return
    load_checkpoint(tmp_path / "saved", other, resumed)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value.to(other.state_dict()[name].dtype)), name
    saved, found = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    for number, p in enumerate(layers().parameters()):
        expected, actual = in_full(saved[number], p.detach()), in_full(found[number], p.detach())
        for name, value in expected.items():
            if states is not None and (here is None or FORMS[here][2] != states) and p.dim() > 1 and name != "step":
                value = rounded_state(value, states)
            assert torch.equal(actual[name], value)
    assert other(batch(0)).isfinite().all()  # what was loaded may be used


# --- weights ----------------------------------------------------------------------------------------------------------


@weight_forms
def test_only_an_offload_optimizer_writes_weights(home: str, weights: Any) -> None:
    model = OffloadModel(layers(), "cpu", home, 6, store_dtype=weights)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected an OffloadOptimizer .* got a SGD.* nothing was changed"):
        plain.step()
    p = next(model.parameters())
    p.data = torch.zeros(72, 72)
    with pytest.raises(RuntimeError, match=r"other data was assigned to parameter 0.weight.* was dropped"):
        model(batch(0))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        p.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 0.weight was written in place"):
            model(batch(0))
    model.load_state_dict(before)
    assert model(batch(0)).isfinite().all()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@weight_forms
def test_layers_that_write_their_weights_are_refused_and_leave_the_model_as_it_was(home: str, weights: Any) -> None:
    table = nn.Embedding(50, 8, max_norm=0.5)
    model = OffloadModel(nn.Sequential(table, nn.Linear(8, 8)), "cpu", home, 2, store_dtype=weights)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"wrote their own parameters .0.weight."):
            model(torch.tensor([1, 2]))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@weight_forms
def test_copies_and_gradients_by_autograd_grad_are_refused(weights: Any) -> None:
    model = OffloadModel(layers(), "cpu", store_dtype=weights)
    with pytest.raises(TypeError, match="cannot copy or pickle an OffloadModel with store_dtype="):
        copy.deepcopy(model)
    loss = model(batch(0)).sum()
    with pytest.raises(RuntimeError, match=r"gradients of parameters .* would be rounded"):
        torch.autograd.grad(loss, list(model.parameters()))
    assert model(batch(0)).isfinite().all()


# --- gradients --------------------------------------------------------------------------------------------------------


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).pow(2).sum()


def of_bfloat16(home: str = "cpu", **more: Any) -> OffloadModel:
    return OffloadModel(layers(), "cpu", home, num_slices=6, gradient_dtype=BF16, **more)


def test_a_gradient_that_is_not_zeroed_stays_clipped(home: str) -> None:
    twins = Twins("bfloat16 gradients", home, "momentum", max_norm=0.3)
    twins.backward()
    before = [p.grad.float() for p in twins.model.parameters()]
    twins.ours.step()
    twins.ours.synchronize()
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in before]))
    for gradient, p in zip(before, twins.model.parameters(), strict=True):
        assert torch.equal(p.grad, (gradient * torch.clamp(0.3 / (norm + 1e-6), max=1.0)).to(BF16))


@pytest.mark.parametrize("how", ["stored", "a forward waits"])
def test_a_second_backward_is_refused_before_anything_ran(home: str, how: str) -> None:
    model = of_bfloat16(home)
    if how == "a forward waits":
        first, second = model(batch(1)), model(batch(2))
        with pytest.raises(RuntimeError, match="1 more forwards of this model still need their backward, and the sum"):
            loss_of(second).backward()
        assert all(p.grad is None for p in model.parameters())
        del first
        loss_of(second).backward()
        return
    loss_of(model(batch(1))).backward()
    before = [p.grad.clone() for p in model.parameters()]
    loss = loss_of(model(batch(2)))
    loads = model.statistics().shard_loads
    with pytest.raises(RuntimeError, match=r"second backward before zero_grad.*accumulate_in_gradient_dtype=True"):
        loss.backward(retain_graph=True)
    assert model.statistics().shard_loads == loads
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    loss.backward()  # the refused one freed nothing of the model's


def test_accumulation_that_was_asked_for_rounds_each_sum(home: str) -> None:
    model = of_bfloat16(home, accumulate_in_gradient_dtype=True)
    each = []
    for k in (1, 2):
        bare = layers()
        loss_of(bare(batch(k))).backward()
        loss_of(model(batch(k))).backward()
        each.append([p.grad for p in bare.parameters()])
    for p, first, second in zip(model.parameters(), *each, strict=True):
        assert torch.equal(p.grad, (first.to(BF16).float() + second).to(BF16))


def test_gradients_that_autograd_returns_and_those_of_tied_and_sparse_parameters_are_not_rounded(home: str) -> None:
    """Also those of parameters with hooks: they are stored in no file, or are sums of several."""
    bare, model = layers(), of_bfloat16(folder_in(home, "a"))
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)
    expected = torch.autograd.grad(loss_of(bare(batch(0))), list(bare.parameters()))
    found = torch.autograd.grad(loss_of(model(batch(0))), list(model.parameters()))
    loss_of(model(batch(0))).backward()
    for k, (gradient, requested, p) in enumerate(zip(expected, found, model.parameters(), strict=True)):
        assert torch.equal(requested, gradient)
        assert torch.equal(p.grad, gradient.to(BF16) if k else gradient)
    assert torch.equal(seen[-1], expected[0])
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Embedding(50, 72, sparse=True), nn.Linear(72, 72), nn.Linear(72, 72))
    bare[2].weight = bare[1].weight
    model = OffloadModel(copy.deepcopy(bare), "cpu", folder_in(home, "b"), num_slices=3, gradient_dtype=BF16)
    for run in (bare, model):
        loss_of(run(torch.tensor([1, 5, 1]))).backward()
    assert torch.equal(model[0].weight.grad.to_dense(), bare[0].weight.grad.to_dense())
    torch.testing.assert_close(model[1].weight.grad, bare[1].weight.grad)
    assert model[1].bias.grad.dtype == BF16


# --- states -----------------------------------------------------------------------------------------------------------

state_forms = pytest.mark.parametrize("form", ["bfloat16 states", "8-bit states"])


@state_forms
def test_parameters_that_stay_on_the_device_store_states_in_the_form(tmp_path: Path, form: str) -> None:
    twins = Twins(form, f"{tmp_path}/a/", resident="3.*", max_norm=1e9)
    twins.step(2)
    twins.assert_equal()
    saved = twins.ours.state_dict()
    each = sum(value.nbytes for key, value in saved["state"][4].items() if key != "step")  # of 3.weight
    assert each == 72 * 72 * 4 if form == "bfloat16 states" else 2 * (72 * 72 + 4 * 21)


@state_forms
def test_norms_biases_and_small_matrices_keep_states_in_full(home: str, form: str) -> None:
    model = OffloadModel(nn.Sequential(nn.Linear(64, 63), nn.LayerNorm(63), nn.Linear(63, 66)), "cpu", home)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, states=FORMS[form][2])
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    kept = {0, 1, 2, 3, 5}  # 64 x 63 is less than 4,096
    for number, state in optimizer.state_dict()["state"].items():
        assert ("exp_avg" in state and state["exp_avg"].dtype == torch.float32) == (number in kept)


def test_states_that_do_not_belong_together_are_refused_and_change_nothing() -> None:
    twins = Twins("8-bit states", "cpu")
    twins.step()
    saved = twins.ours.state_dict()
    for damage in ({"exp_avg:scales": None}, {"exp_avg:scales": torch.ones(3)}, {"exp_avg:8bit": torch.ones(72, 72)}):
        first = {key: value for key, value in {**saved["state"][0], **damage}.items() if value is not None}
        with pytest.raises(ValueError, match=r"in shape .* got .*"):
            twins.ours.load_state_dict({**saved, "state": {**saved["state"], 0: first}})
    twins.assert_equal()


def test_a_sparse_gradient_of_an_encoded_state_is_refused_in_step(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", 16 << 20)
    model = OffloadModel(nn.Sequential(nn.Embedding(200, 64, sparse=True), nn.Linear(64, 64)), "cpu", home)
    optimizer = OffloadOptimizer(model, torch.optim.Adagrad, states="8bit")
    model(torch.tensor([1, 2])).sum().backward()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


# --- the 8-bit map of optimizer states --------------------------------------------------------------------------------


def stored(values: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.full_like(values, 77, dtype=torch.uint8)
    scales = torch.full((-(-values.numel() // BLOCK),), torch.nan)
    encode(values, codes, scales)
    return codes, scales


def back(values: Tensor) -> Tensor:
    found = torch.full_like(values, torch.nan)
    decode(*stored(values), found)
    return found


def hard_values(count: int, *, signed: bool) -> Tensor:
    """Values over ten decades, blocks of other sizes, exact levels and the middles between them."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10 ** -(10 * torch.rand(count, generator=generator))
    known = levels(signed)
    some = torch.cat([known, (known[1:] + known[:-1]) / 2])[:count]
    values[: some.numel()] = some
    values *= 10 ** torch.randn(-(-count // BLOCK), generator=generator).repeat_interleave(BLOCK)[:count]
    return values if signed else values.abs()


@pytest.mark.parametrize("count", [1, 255, 256, 1000, 4096])
@pytest.mark.parametrize("signed", [False, True])
def test_each_value_becomes_the_nearest_level_of_its_block(count: int, signed: bool) -> None:
    values = hard_values(count, signed=signed)
    found = back(values)
    for block, result in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max()
        known = levels(bool((block < 0).any())) * largest
        distance = (block.unsqueeze(1).double() - known.double()).abs().min(dim=1).values
        error = (block.double() - result.double()).abs()
        # Positive values below the least level are not rounded to 0: the error is at most this level.
        least = float(known[1]) if not (block < 0).any() else 0.0
        near = error <= distance + 1e-7 * float(largest)
        raised = (block > 0) & (result.double() == least) & (least > 0)
        assert bool((near | raised).all())


def test_zeros_stay_zeros_and_a_block_that_is_not_finite_says_so() -> None:
    values = torch.ones(4 * BLOCK)
    values[:BLOCK] = 0
    values[BLOCK + 3] = torch.nan
    values[2 * BLOCK + 3] = -torch.inf
    found = back(values)
    assert torch.equal(found[:BLOCK], torch.zeros(BLOCK))
    assert not found[BLOCK : 2 * BLOCK].isfinite().any()
    assert not found[2 * BLOCK : 3 * BLOCK].isfinite().any()
    assert torch.equal(found[3 * BLOCK :], torch.ones(BLOCK))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("signed", [False, True])
def test_levels_are_those_of_the_libraries(signed: bool) -> None:
    """In an environment of their own (``pip install torchao bitsandbytes``), where these are not installed."""
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    utils: Any = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao: pip install torchao")
    assert torch.equal(levels(signed), functional.create_dynamic_map(signed=signed))
    torch.testing.assert_close(levels(signed), torch.tensor(utils.create_dynamic_map(signed=signed)), rtol=1e-6, atol=0)
