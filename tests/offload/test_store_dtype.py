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
from gradcache import GradCache
from offload import DiskHome, MemoryPolicy, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.streaming.weight_forms import noise, weight_form_of
from tests.offload.twins import CLASSES, Twins, bytes_of_a_step, exchanged, folder_in, layers, resumed

FORMS: list[Any] = ["split", torch.bfloat16]
forms = pytest.mark.parametrize("form", FORMS, ids=["split", "bfloat16"])


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


class RoundedWeights(Twins):
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

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            x = self.batch()
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

    def assert_equal(self) -> None:
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


@forms
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("adafactor", "disk"),
        ("adagrad", "disk"),
        ("adamw", "disk"),
        ("momentum", "disk"),
        ("adafactor", "host"),
        ("adamw", "host"),
    ],
    indirect=["home"],
)
@pytest.mark.usefixtures("small_blocks")
def test_training_is_that_of_a_plain_model_with_rounded_weights(home: str, name: str, form: Any) -> None:
    twins = RoundedWeights(name, home, form)
    twins.step(3)
    twins.assert_equal()


@forms
@pytest.mark.usefixtures("small_blocks")
def test_clipping_updates_in_backward_and_shards_in_memory_change_no_bit(tmp_path: Path, form: Any) -> None:
    RoundedWeights("adamw", f"{tmp_path}/", form, update_in_backward=True).assert_equal_where_shards_move()


@forms
def test_bits_do_not_depend_on_how_updates_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setattr("offload.streaming.weight_forms.PIECE", 512)
    found = []
    for update_block_bytes in (64, 4096, 16 << 20):
        monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", update_block_bytes)
        twins = RoundedWeights("adamw", f"{tmp_path}/{update_block_bytes}/", form, max_norm=0.1, states="8bit")
        twins.step(2)
        states = (v for state in twins.ours.state_dict()["state"].values() for v in state.values())
        found.append([*twins.model.state_dict().values(), *map(torch.as_tensor, states)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@resumed(FORMS)
@pytest.mark.usefixtures("small_blocks")
def test_a_resumed_run_continues_bit_for_bit(home: str, tmp_path: Path, form: Any, through: str) -> None:
    first, second = (RoundedWeights("adamw", folder_in(home, name), form, max_norm=0.1) for name in "ab")
    first.step(2)
    second.assert_resumes(first, through, tmp_path)


@pytest.mark.parametrize(
    ("form", "states", "param_dtype", "gradients", "moved"),
    [
        (None, None, None, None, 36),
        (None, torch.bfloat16, None, None, 28),
        (None, "8bit", None, None, 24 + 4 / 64),
        (None, None, None, torch.bfloat16, 32),
        (None, "8bit", None, torch.bfloat16, 20 + 4 / 64),
        ("split", None, None, None, 34),
        ("split", None, None, torch.bfloat16, 30),
        (torch.bfloat16, None, torch.bfloat16, None, 30),
        ("split", "8bit", torch.bfloat16, None, 22 + 4 / 64),
        (torch.bfloat16, "8bit", None, None, 18 + 4 / 64),
        ("split", "8bit", None, torch.bfloat16, 18 + 4 / 64),
        (torch.bfloat16, "8bit", None, torch.bfloat16, 14 + 4 / 64),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_blocks")
def test_a_step_of_adam_with_clipping_moves_so_many_bytes_a_parameter(
    tmp_path: Path, form: Any, states: Any, moved: float, param_dtype: Any, gradients: Any
) -> None:
    """Of matrices; and without what the slots keep between the passes."""
    how: dict[str, Any] = {"store_dtype": form, "param_dtype": param_dtype, "gradient_dtype": gradients}
    total = sum(bytes_of_a_step(f"{tmp_path}/", states=states, **how))
    # Two shards are still in their slots when backward begins.
    assert total == (5 * moved - 2 * (2 if form else 4)) * 64 * 64


# --- the forms -------------------------------------------------------------------------------------------------------


def test_a_split_value_is_restored_bit_by_bit_from_its_nearest_bfloat16_and_the_rest() -> None:
    form = weight_form_of("split")
    assert form is not None
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    values = of_bits(np.concatenate([drawn, np.array(edges + [e + (1 << 31) for e in edges], dtype=np.uint64)]))
    upper, lower = torch.empty(values.shape, dtype=torch.bfloat16), torch.empty(values.shape, dtype=torch.int16)
    form.encode(values, upper, lower)
    found = torch.empty_like(values)
    form.decode(upper, lower, found)
    number = ~values.isnan()
    assert torch.equal(found[number].view(torch.int32), values[number].view(torch.int32))
    assert bool(found[~number].isnan().all())
    assert bool(upper[~number].isnan().all())
    finite = values.isfinite() & (values.abs() < 3e38)
    chosen, other = (upper[finite].double() - values[finite].double()).abs(), values[finite].bfloat16().double()
    assert torch.equal(chosen, (other - values[finite].double()).abs())  # as near as rounding to even is


def test_stochastic_rounding_is_between_neighbours_exact_on_average_and_another_in_each_step() -> None:
    form = weight_form_of(torch.bfloat16)
    assert form is not None
    count = 100_000
    value = torch.tensor(1.0 + 0.3 / 128)  # between 1 and 1 + 1 / 128
    rounded = []
    for step, name in ((1, "a"), (2, "a"), (1, "b")):
        upper = torch.empty(count, dtype=torch.bfloat16)
        form.store(value.repeat(count), upper, None, step=step, name=name, begin=0)
        rounded.append(upper.double())
        assert set(upper.unique().tolist()) == {1.0, 1.0 + 1 / 128}
        assert abs(float(rounded[-1].mean() - 1) * 128 - 0.3) < 4 * (0.21 / count) ** 0.5
    for k, one in enumerate(rounded):
        for other in rounded[k + 1 :]:
            both = float(((one > 1) & (other > 1)).double().mean())
            assert abs(both - 0.09) < 4 * (0.09 / count) ** 0.5  # independent
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1.5])
    upper = torch.empty(5, dtype=torch.bfloat16)
    form.store(special.clone(), upper, None, step=1, name="a", begin=0)
    assert torch.equal(upper.float()[[0, 1, 3, 4]], special[[0, 1, 3, 4]])
    assert bool(upper[2].isnan())
    assert torch.equal(noise(3, "a", 0, 1000)[500:], noise(3, "a", 500, 500))


# --- what is read and written outside of updates ---------------------------------------------------------------------


@exchanged(FORMS)
def test_a_checkpoint_loads_into_another_form_or_is_refused(home: str, tmp_path: Path, here: Any, there: Any) -> None:
    def make(form: Any, part: str) -> tuple[OffloadModel, OffloadOptimizer]:
        model = OffloadModel(layers(), "cpu", folder_in(home, part), 6, store_dtype=form)
        return model, OffloadOptimizer(model, torch.optim.AdamW)

    model, optimizer = make(here, "a")
    model(torch.ones(2, 72)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "saved", model, optimizer)
    other, loaded = make(there, "b")
    before = {k: v.clone() for k, v in other.state_dict().items()}
    if there is torch.bfloat16 and here is not torch.bfloat16:
        with pytest.raises(ValueError, match=r"would lose digits as torch.bfloat16"):
            load_checkpoint(tmp_path / "saved", other, loaded)
        expected = before
    else:
        load_checkpoint(tmp_path / "saved", other, loaded)
        expected = model.state_dict()
        states = loaded.state_dict()["state"]
        for number, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(states[number][name], value) for name, value in state.items())
    for name, value in other.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
    assert other(torch.ones(2, 72)).isfinite().all()  # what was loaded may be used


@forms
def test_layers_on_the_meta_device_are_initialised_and_read_in_full(home: str, tmp_path: Path, form: Any) -> None:
    expected = layers().state_dict()
    with torch.device("meta"):
        empty, again = layers(), layers()
    torch.manual_seed(0)
    model = OffloadModel(empty, "cpu", home, 6, store_dtype=form)
    save_checkpoint(tmp_path / "exact", layers())
    read = OffloadModel(again, "cpu", home, 6, store_dtype=form, pretrained=tmp_path / "exact")
    for name, value in expected.items():
        for found in (model.state_dict()[name], read.state_dict()[name]):
            assert torch.equal(found, value.to(found.dtype)), name


@forms
def test_only_an_offload_optimizer_writes_weights(home: str, form: Any) -> None:
    model = OffloadModel(layers(), "cpu", home, 6, store_dtype=form)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 72)).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected an OffloadOptimizer .* got a SGD.* nothing was changed"):
        plain.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    p = next(model.parameters())
    p.data = torch.zeros(72, 72)
    with pytest.raises(RuntimeError, match=r"other data was assigned to parameter 0.weight.* was dropped"):
        model(torch.ones(2, 72))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        p.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"parameter 0.weight was written in place"):
            model(torch.ones(2, 72))
    model.load_state_dict(before)
    assert model(torch.ones(2, 72)).isfinite().all()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@forms
def test_layers_that_write_their_weights_are_refused_and_leave_the_model_as_it_was(home: str, form: Any) -> None:
    table = nn.Embedding(50, 8, max_norm=0.5)
    model = OffloadModel(nn.Sequential(table, nn.Linear(8, 8)), "cpu", home, 2, store_dtype=form)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"wrote their own parameters .0.weight."):
            model(torch.tensor([1, 2]))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"store_dtype": "half"}, ValueError, "expected None .*, torch.bfloat16 or 'split', got store_dtype='half'"),
        ({"store_dtype": 16}, TypeError, "got int .store_dtype=16."),
        ({"store_dtype": "split", "model": layers().double()}, ValueError, "expected float32 parameters"),
        ({"store_dtype": "split", "model": [nn.Embedding(4, 4, sparse=True)]}, ValueError, "expected dense gradients"),
        ({"store_dtype": "split", "offload_device": "keep"}, ValueError, "expected DiskHome.keep=False."),
    ],
)
def test_what_cannot_be_stored_so_is_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    if arguments.get("offload_device") == "keep":
        arguments = {**arguments, "offload_device": DiskHome(tmp_path, keep=True)}
    with pytest.raises(error, match=match):
        OffloadModel(**{"model": layers(), "device": "cpu", **arguments})


@forms
def test_copies_and_gradients_by_autograd_grad_are_refused(form: Any) -> None:
    model = OffloadModel(layers(), "cpu", store_dtype=form)
    with pytest.raises(TypeError, match="cannot copy or pickle an OffloadModel with store_dtype="):
        copy.deepcopy(model)
    loss = model(torch.ones(2, 72)).sum()
    with pytest.raises(RuntimeError, match=r"gradients of parameters .* would be rounded"):
        torch.autograd.grad(loss, list(model.parameters()))
    assert model(torch.ones(2, 72)).isfinite().all()


@forms
@pytest.mark.parametrize("home_kind", ["host", "disk"])
def test_a_construction_that_fails_leaves_the_layers_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, home_kind: str
) -> None:
    bare = layers()
    expected = copy.deepcopy(bare.state_dict())

    def broken(*_: Any) -> None:
        raise MemoryError("broken")

    monkeypatch.setattr("offload.model.return_freed_memory", broken)
    with pytest.raises(MemoryError, match="broken"):
        OffloadModel(bare, "cpu", "cpu" if home_kind == "host" else tmp_path, store_dtype=form)
    for name, value in bare.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])


@forms
@pytest.mark.usefixtures("small_blocks")
def test_an_update_that_fails_half_way_is_resumed_from_files_and_noticed_in_memory(
    home: str, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    monkeypatch.setattr("offload.streaming.weight_forms.PIECE", 1024)
    twins = RoundedWeights("adamw", home, form, max_norm=0.1)
    twins.step()
    twins.assert_equal()
    param_block = twins.ours.param_blocks[twins.model._homes.shards[0]][-1]
    optimizer = param_block.prepare(twins.ours.options())
    step, calls = type(optimizer).step, iter([True, False])

    def broken(*_: Any) -> None:
        step(optimizer)
        if not next(calls, True):
            raise ArithmeticError("broken")

    monkeypatch.setattr(optimizer, "step", broken)
    twins.step()
    with pytest.raises(RuntimeError if home == "cpu" else ArithmeticError, match="broken"):
        twins.ours.synchronize()
    if home != "cpu":
        twins.assert_equal()
        twins.step()
        twins.assert_equal()


@forms
def test_chunks_of_a_wrapped_tower_and_of_the_model_itself_give_gradients_in_full(form: Any) -> None:
    class Tower(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.outer = inner, nn.Linear(80, 16)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.outer(self.inner(x))
            return result

    bare = layers()
    with torch.no_grad():
        for p in bare.parameters():
            p.copy_(nearest(p))
    a, b = torch.randn(2, 8, 72, generator=torch.Generator().manual_seed(0))
    found = []
    for inner in (bare, OffloadModel(copy.deepcopy(bare), "cpu", "cpu", 6, store_dtype=form)):
        torch.manual_seed(1)
        tower = Tower(inner)
        cache = GradCache([tower, inner], chunk_sizes=4, loss_fn=lambda x, y: (x @ x.T).mean() + (y @ y.T).sum())
        for _ in range(2):
            cache(a, b)
        found.append([p.grad for p in tower.parameters()])
    for expected, actual in zip(*found, strict=True):
        assert expected is not None
        assert actual is not None
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
        assert not torch.equal(actual, actual.bfloat16().float())
