"""Each defect found in a peer is a test here: it fails if the defect comes back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.functional import cached
from gradcache.loss import SimpleContrastiveLoss
from tests.gradcache.towers import energy, offloaded, tower
from tests.gradients import assert_same_step


class Named(nn.Module):
    """Adds its members; ``table`` has rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tower()

    def forward(self, a: Tensor, b: Tensor | None = None, table: Tensor | None = None, scale: float = 1.0) -> Tensor:
        total = a if b is None else a + b
        return self.inner(total if table is None else total + table.sum(0)) * scale


# -- 1: rows lost in splitting -------------------------------------------------------------------------------------


def test_unequal_rows_between_members_are_refused_not_truncated() -> None:
    step = GradCache([Named()], 2, energy)
    with pytest.raises(ValueError, match="no row is dropped"):
        step({"a": torch.randn(10, 8), "b": torch.randn(4, 8)})
    assert all(parameter.grad is None for parameter in step.models[0].parameters())


@pytest.mark.parametrize("form", ["dict", "list", "pair", "broadcast", "tensor", "nested"])
def test_every_form_of_input_reaches_the_model_with_all_its_rows(form: str) -> None:
    bare, ours = Named(), Named()
    a, b, table = torch.randn(7, 8), torch.randn(7, 8), torch.randn(3, 8)
    given, loss = {
        "dict": ({"a": a, "b": b, "scale": 2.0}, lambda m: m(a, b, scale=2.0)),
        "list": ([a, b], lambda m: m(a, b)),
        "pair": (([a], {"b": b, "table": None}), lambda m: m(a, b)),
        "broadcast": ({"a": a, "table": table}, lambda m: m(a, table=table)),
        "tensor": (a, lambda m: m(a)),
        "nested": ((a, b), lambda m: m(a, b)),
    }[form]
    energy(loss(bare)).backward()
    GradCache([ours], 3, energy, broadcast=("table",))(given)
    assert_same_step([bare], [ours])


def test_extra_inputs_models_and_chunk_sizes_are_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="one input per model"):
        GradCache([tower()], 2, energy)(x, x)
    with pytest.raises(ValueError, match="one input per model"):
        GradCache([tower(), tower()], 2, energy)(x)
    with pytest.raises(ValueError, match="one chunk size per model"):
        GradCache([tower(), tower()], [2, 3, 4], energy)


def test_member_that_can_not_be_cut_is_refused_until_it_is_declared() -> None:
    class Texts(nn.Linear):
        def forward(self, a: Tensor, names: list[str]) -> Tensor:
            assert names == ["p", "q"]
            return super().forward(a)

    given = {"a": torch.randn(4, 8), "names": ["p", "q"]}
    with pytest.raises(TypeError, match="broadcast"):
        GradCache([Texts(8, 6)], 2, energy)(given)
    GradCache([Texts(8, 6)], 2, energy, broadcast=("names",))(given)


# -- 2: the cache is cut as the input was --------------------------------------------------------------------------


def test_cache_follows_a_split_function_that_does_not_follow_the_chunk_size() -> None:
    x = torch.randn(10, 8)
    bare, ours, shards = tower(), tower(), tower()
    weight = torch.randn(10, 6)
    (bare(x) * weight).sum().backward()
    for model in (ours, offloaded(shards)):
        GradCache([model], 4, lambda r: (r * weight).sum(), split_input_fn=lambda x, size: list(x.split([1, 6, 3])))(x)
    assert_same_step([bare], [ours])
    assert_same_step([bare], [shards])


# -- 3: generators -------------------------------------------------------------------------------------------------


def test_generators_of_devices_that_no_input_lives_on_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that moves CPU inputs to an accelerator draws there. An accelerator is faked down to its generator."""

    class Accelerator:
        """Counts its draws; its state is the counter."""

        drawn = 0
        is_initialized = staticmethod(lambda: True)
        get_rng_state = staticmethod(lambda device: torch.tensor([Accelerator.drawn]))
        set_rng_state = staticmethod(lambda state, device: setattr(Accelerator, "drawn", int(state)))

        @classmethod
        def draw(cls) -> int:
            cls.drawn += 1
            return cls.drawn

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator)
    seen: list[int] = []
    model = tower()
    model.register_forward_pre_hook(lambda *_: seen.append(Accelerator.draw()))
    # Autocast of a device that is not there can not be entered; it is not what this test is about.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    leaf, again = cached(lambda m, batch: m(batch))(model, torch.randn(2, 8))
    GradCache([model], 2, energy)(torch.randn(4, 8))
    energy(leaf).backward()
    again(leaf)
    assert seen == [1, 2, 3, 2, 3, 1]
    assert Accelerator.drawn == 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device for its generator")
def test_dropout_on_the_device_is_replayed_although_the_inputs_are_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).cuda()
    masks: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: masks.append(output.detach() == 0))
    GradCache([model], 2, energy, process_fn=lambda chunk: chunk.cuda())(torch.randn(6, 8))
    assert len(masks) == 6
    assert all(map(torch.equal, masks[:3], masks[3:]))


# -- 7: validation before gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["frozen", "ignored by the loss"])
def test_a_tower_without_a_gradient_runs_once_and_is_left_alone(how: str) -> None:
    model, other, calls = tower(), tower(1).requires_grad_(how != "frozen"), []
    other.register_forward_hook(lambda *_: calls.append(1))
    loss = SimpleContrastiveLoss() if how == "frozen" else lambda a, b: a.square().sum()
    GradCache([model, other], 2, loss)(torch.randn(4, 8), torch.randn(4, 8))
    assert all(parameter.grad is None for parameter in other.parameters())
    assert len(calls) == 2
    assert model[0].weight.grad is not None


def test_unreduced_loss_is_refused_before_any_gradient_is_written() -> None:
    models = [tower(), tower(1)]
    before = torch.ones_like(models[0][0].weight)
    models[0][0].weight.grad = before
    step = GradCache(models, 2, SimpleContrastiveLoss())
    with pytest.raises(ValueError, match="expected a scalar loss"):
        step(torch.randn(4, 8), torch.randn(4, 8), reduction="none")
    assert models[0][0].weight.grad is before
    assert torch.equal(before, torch.ones_like(before))


# -- 9: views ------------------------------------------------------------------------------------------------------


def test_representation_that_is_a_view_does_not_keep_the_hidden_states_alive() -> None:
    """``hidden[:, 0]`` of 128 positions pins 128 times its size."""
    stored: list[int] = []

    class Watching(GradCache):
        def compute_loss(self, *reps: Tensor, **loss_kwargs: Any) -> Any:
            stored.extend(rep.untyped_storage().nbytes() for rep in reps)
            return super().compute_loss(*reps, **loss_kwargs)

    x = torch.randn(4, 128, 8)
    for chunk_size in (4, 2):
        Watching([tower()], chunk_size, energy, get_rep_fn=lambda hidden: hidden[:, 0])(x)
    assert stored == [4 * 6 * 4] * 2


# -- 10: precision and checkpointing -------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [False, True])
def test_autocast_in_bfloat16_equals_the_whole_batch_under_autocast(outer: bool) -> None:
    bare, ours = tower(), tower()
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        SimpleContrastiveLoss()(bare(x), bare(y)).backward()
    if outer:
        # The weight cache of an enclosing autocast must not keep casts that the first pass made under no_grad.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            GradCache([ours, ours], 6, SimpleContrastiveLoss())(x, y)
    else:
        GradCache([ours, ours], 6, SimpleContrastiveLoss(), precision=torch.bfloat16)(x, y)
    assert_same_step([bare], [ours], tolerance=2e-2)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("evaluate", [False, True])
def test_weights_stay_trainable_inside_an_autocast_around_a_step(precision: torch.dtype | None, evaluate: bool) -> None:
    model = tower()
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.set_grad_enabled(not evaluate):
            GradCache([model], 2, energy, precision=precision)(x)
        model.zero_grad()
        energy(model(x)).backward()
    assert model[0].weight.grad is not None


def test_fp16_needs_a_scaler_and_scales_the_gradients() -> None:
    with pytest.raises(ValueError, match="scaler"):
        GradCache([tower()], 2, energy, fp16=True)
    bare, ours = tower(), tower()
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        expected = energy(bare(x))
    expected.backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    loss = GradCache([ours], 2, energy, fp16=True, scaler=scaler)(x)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-2)
    scaler.unscale_(optimizer)
    assert_same_step([bare], [ours], tolerance=5e-2)
