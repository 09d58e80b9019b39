"""Layers and loops off the usual road: what they see, write and keep is as in the bare model, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from pipe.recompute.phase import is_recomputing

WIDTH = 8


def batch(seed: int = 1, rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def mlp(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


@pytest.fixture(params=[False, True], ids=["kept", "recomputed"])
def wrap(request: pytest.FixtureRequest, home: str) -> Callable[..., OffloadModel]:
    def wrap(bare: nn.Sequential, **more: Any) -> OffloadModel:
        return OffloadModel(copy.deepcopy(bare), "cpu", home, len(bare), request.param, **more)

    return wrap


def train(run: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Outputs and gradients of two forwards before two backwards."""
    outputs = [run(x) for x in inputs]
    for output in outputs:
        output.pow(2).sum().backward()
    return [*outputs, *(torch.zeros_like(p) if p.grad is None else p.grad for p in run.parameters())]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5)


# --- what leaves a visit owns its memory ------------------------------------------------------------------------------


class PassesViews(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:2]


class WritesView(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        value[1].zero_()
        return value[0]


def test_an_in_place_write_that_shows_in_another_input_is_refused(wrap: Callable[..., OffloadModel]) -> None:
    model = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), PassesViews(), WritesView()))
    with pytest.raises(RuntimeError, match="shares memory"):
        model(batch())


# --- writes to weights ------------------------------------------------------------------------------------------------


class Decaying(nn.Module):
    """Writes another value at each run."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if not (self.asks and is_recomputing()):
            with torch.no_grad():
                self.weight.mul_(0.5)
        return x @ self.weight


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("places", [(1,), (0, 1, 2)])
def test_a_write_that_a_second_run_would_repeat_counts_once(
    wrap: Callable[..., OffloadModel], asks: bool, places: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(Decaying(asks=asks) if k in places else nn.Linear(WIDTH, WIDTH) for k in range(3)))
    bare.insert(1, nn.Dropout(0.3))
    model = wrap(bare)
    for run in (bare, model):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            run(batch(seed)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            optimizer.step()
    assert_same(list(model.parameters()), list(bare.parameters()))


@pytest.mark.parametrize("backup", ["data", "state_dict", "clone"])
def test_data_that_is_assigned_over_a_backup_that_shares_memory_is_refused(
    wrap: Callable[..., OffloadModel], backup: str
) -> None:
    """As average weights are often exchanged for an evaluation."""
    bare = mlp()
    model = wrap(bare)
    for run in (bare, model):
        if backup == "state_dict":
            held = list(run.state_dict().values())
        else:
            held = [p.data.clone() if backup == "clone" else p.data for p in run.parameters()]
        for p in run.parameters():
            p.data = torch.zeros_like(p)
        if run is bare or backup == "clone":
            run(batch())
        else:
            with pytest.raises(RuntimeError, match=r"keep a copy instead, such as p\.data\.clone\(\)"):
                run(batch())
        for p, value in zip(run.parameters(), held, strict=True):
            p.data = value
        del held
    assert_same([model(batch())], [bare(batch())])


# --- structure --------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        return y if mask is None else y * mask


def test_an_argument_that_later_layers_would_miss_is_refused() -> None:
    model = OffloadModel([Masked(), Masked()], "cpu", checkpoint_activation=False)
    for call in (lambda: model(batch(), mask=torch.ones(6, 1)), lambda: model(batch(), torch.ones(6, 1))):
        with pytest.raises(TypeError, match="mask would be missing in later layers"):
            call()
    model(batch(), None)
    OffloadModel([Masked(), nn.Linear(WIDTH, WIDTH)], "cpu", checkpoint_activation=False)(
        batch(), mask=torch.ones(6, 1)
    )


def test_parameters_that_share_memory_without_being_tied_are_refused() -> None:
    bare = mlp()
    bare[3][0].weight.data = bare[0][0].weight.data  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match=r"0\.0\.weight and 3\.0\.weight share memory"):
        OffloadModel(bare, "cpu", num_slices=2, checkpoint_activation=False)
    flat = torch.randn(2, WIDTH)
    apart = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
    for layer, row in zip(apart, flat, strict=True):
        layer.weight.data = row
    OffloadModel(apart, "cpu", num_slices=3, checkpoint_activation=False)


def test_a_shallow_copy_is_refused() -> None:
    model = OffloadModel(mlp(), "cpu", num_slices=3, checkpoint_activation=False)
    with pytest.raises(TypeError, match=r"copy\.deepcopy\(\)"):
        copy.copy(model)


def test_a_cache_of_parametrizations_around_a_forward_with_gradients_is_refused(
    wrap: Callable[..., OffloadModel],
) -> None:
    """A recomputation would run a power iteration of its own, and a later forward meet weights of an ended visit."""
    layers = mlp()
    nn.utils.parametrizations.spectral_norm(layers[1][0])  # type: ignore[index]
    bare, model = layers, wrap(copy.deepcopy(layers))
    with nn.utils.parametrize.cached():
        with pytest.raises(RuntimeError, match=r"expected no torch\.nn\.utils\.parametrize\.cached\(\)"):
            model(batch())
        with torch.no_grad():
            outputs = [run.eval()(batch()) for run in (model, bare)]
    assert_same(outputs[:1], outputs[1:])
    assert_same(train(model.train(), batch()), train(bare.train(), batch()))
