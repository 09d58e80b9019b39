"""Layers and loops off the usual road: what they see, write and keep is as in the bare model, or is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import DiskHome, MemoryPolicy, OffloadModel, OffloadOptimizer
from pipe.recompute.phase import is_recomputing
from tests.offload.parameters_outside import ActNorm, Custom, TiedHead

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


class TiedInput(nn.Module):
    """Passes its table on, for a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(x.abs().long()[:, 0]), self.table.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(value[0])), value[1]


class Queries(nn.Module):
    """Learned queries: a view of a parameter beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.latent.expand(x.size(0), WIDTH)


@pytest.mark.parametrize("kind", ["tied", "queries", "parameter"])
def test_a_parameter_that_a_layer_returns_does_not_change_with_the_slot(
    wrap: Callable[..., OffloadModel], kind: str
) -> None:
    torch.manual_seed(0)
    if kind == "tied":
        bare = nn.Sequential(TiedInput(), Block(), Block(), TiedHead())
    elif kind == "queries":
        bare = nn.Sequential(Queries(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Queries())
    else:
        bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Queries())
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        model = wrap(bare)
        with context():
            kept = [model(batch(seed)) for seed in (1, 2)]
            for seed in (3, 4):
                model(batch(seed))
            assert_same(kept, [bare(batch(seed)) for seed in (1, 2)])
    assert_same(train(wrap(bare), batch(1), batch(2)), train(copy.deepcopy(bare), batch(1), batch(2)))


def test_an_output_that_is_a_parameter_is_a_copy_that_may_be_written(wrap: Callable[..., OffloadModel]) -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.weight

    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), Returns(WIDTH, WIDTH))
    model = wrap(bare)
    y, weight = bare(batch(1))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.mul_(2)
    (y.sum() + (weight * 2).square().sum()).backward()
    y, weight = model(batch(1))
    weight.mul_(2)
    (y.sum() + weight.square().sum()).backward()
    assert_same(list(model.parameters()), list(bare.parameters()))
    assert_same([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_view_of_a_weight_that_outlives_its_visit_keeps_its_values(home: str, slots: int) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(*(Custom(WIDTH) for _ in range(4)))
    model = OffloadModel(
        copy.deepcopy(bare), "cpu", home, 4, checkpoint_activation=False, memory=MemoryPolicy.fixed(slots=slots)
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = train(model, batch(1), batch(2))
    assert_same(found, train(bare, batch(1), batch(2)))
    if slots < 4:
        assert any("outlives" in str(w.message) for w in seen)
    del found
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(batch(3))  # nothing keeps views of these: no slot is given up


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class WritesFirst(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        a, b = value
        a.mul_(3)
        return a + b


@pytest.mark.parametrize("budget", [None, 0])
def test_a_tensor_that_is_passed_on_twice_is_one_tensor_when_written_in_place(home: str, budget: int | None) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(), WritesFirst(), nn.Linear(WIDTH, WIDTH), Twice())
    for recompute in (False, True):
        model = OffloadModel(
            copy.deepcopy(bare),
            "cpu",
            home,
            5,
            recompute,
            memory=MemoryPolicy.fixed(boundary_bytes=budget if recompute else None),
        )
        a, b = model(batch())
        (a.pow(2).sum() + b.sum()).backward()
        c, d = copy.deepcopy(bare)(batch())
        plain = copy.deepcopy(bare)
        c, d = plain(batch())
        (c.pow(2).sum() + d.sum()).backward()
        assert_same([a, b], [c, d])
        assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]


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


@pytest.mark.parametrize("assigns", [False, True])
def test_an_initialisation_from_data_stays(wrap: Callable[..., OffloadModel], assigns: bool) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        ActNorm(WIDTH, assigns=assigns),
        nn.Linear(WIDTH, WIDTH),
        ActNorm(WIDTH, assigns=assigns),
    )
    model, results = wrap(bare), []
    for run in (bare, model):
        results.append([*train(run, batch(1), batch(2)), *(p.detach().clone() for p in run.parameters())])
    assert_same(results[1], results[0])


class Renormed(nn.Module):
    """Clips its weight through ``.data`` in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return x @ self.weight


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


def test_weights_that_are_written_in_every_forward_keep_the_written_values(wrap: Callable[..., OffloadModel]) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(Renormed(), nn.Linear(WIDTH, WIDTH), Renormed())
    model = wrap(bare)
    for run in (bare, model):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for seed in range(5):
            optimizer.zero_grad()
            run(batch(seed)).pow(2).sum().backward()
            optimizer.step()
    assert_same(list(model.parameters()), list(bare.parameters()))


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


@pytest.mark.parametrize("assigns", [False, True])
def test_weights_that_a_layer_writes_in_a_late_forward_keep_the_values(home: str, assigns: bool) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(WIDTH)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 5:
                if assigns:
                    self.weight.data = torch.full((WIDTH,), 7.0)
                else:
                    nn.init.constant_(self.weight, 7)
            return x * self.weight

    model = OffloadModel([Late(), nn.Linear(WIDTH, WIDTH)], "cpu", home, checkpoint_activation=False)
    for _ in range(6):
        model(batch()).sum().backward()
    assert torch.equal(model.get_parameter("0.weight"), torch.full((WIDTH,), 7.0))


def test_data_that_is_assigned_after_the_last_forward_is_stored_by_close(tmp_path: Any) -> None:
    model = OffloadModel(mlp(), "cpu", DiskHome(tmp_path, keep=True), 4, checkpoint_activation=False)
    nn.utils.vector_to_parameters(torch.full((288,), 5.0), model.parameters())
    model.close()
    with torch.device("meta"):
        layers = mlp()
    adopted = OffloadModel(layers, "cpu", DiskHome(tmp_path, keep=True), 4, checkpoint_activation=False)
    assert all(torch.equal(value, torch.full_like(value, 5.0)) for value in adopted.state_dict().values())
    adopted.close()


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_data_that_is_assigned_around_a_step_is_stepped_as_in_torch(home: str, when: str) -> None:
    bare, model = mlp(), OffloadModel(mlp(), "cpu", home, 4, True)
    optimizers: list[Any] = [
        torch.optim.SGD(bare.parameters(), lr=0.1),
        OffloadOptimizer(model, torch.optim.SGD, lr=0.1),
    ]
    for run, optimizer in zip((bare, model), optimizers, strict=True):
        held = list(run.parameters())
        run(batch()).sum().backward()
        if when == "after the step":
            optimizer.step()
        for p in held:
            p.data = torch.full_like(p, 0.25)
        if when == "before the step":
            optimizer.step()
        run(batch())
    assert_same(list(model.parameters()), list(bare.parameters()))


def test_parameters_that_exchange_their_data_keep_both(wrap: Callable[..., OffloadModel]) -> None:
    bare, model = mlp(), wrap(mlp())
    for run in (bare, model):
        a, b = run.get_parameter("0.0.weight"), run.get_parameter("3.0.weight")
        a.data, b.data = b.data, a.data
    assert_same(train(model, batch()), train(bare, batch()))
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


def test_data_that_is_assigned_between_forward_and_backward_is_refused(wrap: Callable[..., OffloadModel]) -> None:
    model = wrap(mlp())
    loss = model(batch()).sum()
    parameter = model.get_parameter("2.0.weight")
    parameter.data = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match=r"2\.0\.weight .* was given other data"):
        loss.backward()
    model(batch()).sum().backward()
    assert torch.equal(parameter, torch.zeros(WIDTH, WIDTH))


# --- structure --------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scale


def adapt(model: nn.Module) -> None:
    for layer in model.children():
        layer[0] = Adapted(layer[0])  # type: ignore[index,operator]


def assign(model: nn.Module) -> None:
    for child in model.children():
        child.load_state_dict({k: v.clone() for k, v in child.state_dict().items()}, assign=True)


def normalise(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(next(iter(model.children()))[0])  # type: ignore[index]


def swap(model: nn.Module) -> None:
    next(iter(model.children()))[0] = nn.Linear(WIDTH, WIDTH)  # type: ignore[index]


@pytest.mark.parametrize("change", [adapt, assign, normalise, swap])
def test_parameters_added_after_wrapping_are_refused_at_the_next_forward(
    wrap: Callable[..., OffloadModel], change: Callable[[nn.Module], None]
) -> None:
    model = wrap(mlp())
    change(model)
    with pytest.raises(RuntimeError, match=r"after this OffloadModel was made: .*0\.0"):
        model(batch())
    with pytest.raises(RuntimeError, match="wrap them afterwards"):
        model.forward_chunks([batch()])


def test_load_state_dict_with_assign_is_refused_and_one_that_copies_works(
    wrap: Callable[..., OffloadModel],
) -> None:
    model = wrap(mlp())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: torch.zeros_like(value) for name, value in before.items()}
    for owner, state in ((model, other), (nn.ModuleList([model]), {f"0.{k}": v for k, v in other.items()})):
        with pytest.raises(ValueError, match="assign=True"):
            owner.load_state_dict(state, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(other)
    assert not any(value.any() for value in model.state_dict().values())


def test_other_modules_and_buffers_after_wrapping_are_followed(wrap: Callable[..., OffloadModel]) -> None:
    bare, model = mlp(), wrap(mlp())
    for run in (bare, model):
        for layer in run.children():
            layer[1] = nn.BatchNorm1d(WIDTH, affine=False)  # type: ignore[index,operator]
    for _ in range(2):
        assert_same(train(model, batch(1), batch(2)), train(bare, batch(1), batch(2)))
    assert_same(list(model.buffers()), list(bare.buffers()))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_sequential_that_does_more_than_call_its_layers_is_refused() -> None:
    own, buffered = mlp(), mlp()
    own.scale = nn.Parameter(torch.ones(1))
    buffered.register_buffer("scale", torch.ones(1))
    for model, what in ((Residual(*mlp()), "a forward"), (own, "parameters"), (buffered, "buffers")):
        with pytest.raises(TypeError, match=f"with {what} of its own"):
            OffloadModel(model, "cpu", num_slices=2, checkpoint_activation=False)
    whole = Residual(*mlp())
    expected = whole(batch())
    assert_same([OffloadModel([whole], "cpu", checkpoint_activation=False)(batch())], [expected])


def test_a_sequential_of_another_class_or_with_hooks_runs_as_before() -> None:
    hooked, renamed = mlp(), type("Renamed", (nn.Sequential,), {})(*mlp())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    for model in (hooked, renamed):
        expected = model(batch())
        assert_same([OffloadModel(model, "cpu", num_slices=2, checkpoint_activation=False)(batch())], [expected])


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


def test_a_forward_from_before_data_was_assigned_cannot_go_back_after_another_one(
    wrap: Callable[..., OffloadModel],
) -> None:
    model = wrap(mlp())
    loss = model(batch()).sum()
    model.get_parameter("2.0.weight").data = torch.zeros(WIDTH, WIDTH)
    with torch.no_grad():
        model(batch())
    with pytest.raises(RuntimeError, match=r"2\.0\.weight .* was given other data"):
        loss.backward()


def test_data_that_was_assigned_may_be_used_outside_of_the_model_before_the_next_forward(
    wrap: Callable[..., OffloadModel],
) -> None:
    bare, model = mlp(), wrap(mlp())
    for run in (bare, model):
        weight = run.get_parameter("2.0.weight")
        weight.data = torch.full((WIDTH, WIDTH), 0.1)
        (weight.pow(2).sum() + run(batch()).sum()).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])  # type: ignore[misc]


def test_weights_that_a_hook_begins_to_write_later_keep_the_written_values(wrap: Callable[..., OffloadModel]) -> None:
    def halve(module: nn.Module, args: Any) -> None:
        if not is_recomputing():
            with torch.no_grad():
                module[0].weight.mul_(0.5)  # type: ignore[index]

    bare, model = mlp(), wrap(mlp())
    for run in (bare, model):
        for step in range(6):
            if step == 3:
                next(iter(run.children())).register_forward_pre_hook(halve)
            run(batch())
    assert_same(list(model.parameters()), list(bare.parameters()))


def test_a_persistent_home_is_not_closed_over_layers_that_were_replaced(tmp_path: Any) -> None:
    model = OffloadModel(mlp(), "cpu", DiskHome(tmp_path, keep=True), 4, checkpoint_activation=False)
    before = model.get_submodule("0")[0]  # type: ignore[index]
    swap(model)
    with pytest.raises(RuntimeError, match="wrap them afterwards"):
        model.close()
    model.get_submodule("0")[0] = before  # type: ignore[index,operator]
    model.close()


def test_copies_and_pickles_keep_the_hooks_of_the_model_itself() -> None:
    model = OffloadModel(mlp(), "cpu", num_slices=3, checkpoint_activation=False)
    model.register_forward_hook(double)
    model.register_forward_pre_hook(add_one, with_kwargs=True)
    expected = model(batch())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(batch()), expected)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def add_one(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 1,), kwargs


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


class Overwrites(nn.Module):
    """Changes in place what its own graph has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y


def test_a_saved_activation_that_is_changed_in_place_raises_or_is_made_again(
    wrap: Callable[..., OffloadModel], request: pytest.FixtureRequest
) -> None:
    """A recomputation that ends before the change has the value that was saved, as with torch's checkpoint."""
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), Overwrites(), nn.Linear(WIDTH, WIDTH))
    model = wrap(copy.deepcopy(bare))
    with pytest.raises(RuntimeError, match=r"in.?place"):
        bare(batch()).sum().backward()
    bare.zero_grad()
    if "recomputed" not in request.node.name:
        with pytest.raises(RuntimeError, match=r"in.?place"):
            model(batch()).sum().backward()
        return
    model(batch()).sum().backward()
    bare[2](bare[0](batch()).exp() + 1).sum().backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])
