"""What torch.optim offers: scalers, states, groups, sparse gradients, refusals; and norms that come with gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.embedding.rowwise import RowWiseAdagrad
from offload.optim.elementwise import check_elementwise
from tests.offload.pair import CLASSES, Pair
from tests.offload.side_by_side import advance, assert_equal, train
from tests.offload.zoo import WIDTH, build


@pytest.mark.parametrize("inf_at", [None, 1])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_grad_scaler(home: str, inf_at: int | None, unscale: bool, max_norm: float | None) -> None:
    """Defect: the GradScaler of a device could not be used, because gradients are on the CPU."""
    pair = Pair("adamw", home, max_norm=max_norm, kinds=("linear", "linear"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0) for _ in range(2)]
    for step in range(3):
        x = pair.batch()
        for run, optimizer, scaler in zip((pair.bare, pair.model), (pair.plain, pair.ours), scalers, strict=True):
            loss = run(x).pow(2).mean() * (float("inf") if step == inf_at else 1)
            scaler.scale(loss).backward()
            if optimizer is pair.plain and max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(pair.bare.parameters(), max_norm)
            elif unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.assert_equal()
    pair.assert_equal_states()


@pytest.mark.parametrize("resident", [None, "1.*"])
def test_a_grad_scaler_after_an_update_in_backward_is_refused(home: str, resident: str | None) -> None:
    """Defect: parameters were updated with scaled gradients."""
    model = OffloadModel(build(["linear", "linear"]), "cpu", home, num_slices=2, resident=resident)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with optimizer.accumulate():
        scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    scaler.step(optimizer)  # of stored gradients
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"a GradScaler scaled the loss.*bfloat16.*update_in_backward=False"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.step()


def test_a_state_dict_of_other_groups_is_refused_and_changes_nothing(home: str) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    saved = pair.ours.state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        pair.ours.load_state_dict({**saved, "param_groups": [*saved["param_groups"], {"params": []}]})
    pair.assert_equal_states()


def test_a_group_added_later_is_trained(home: str) -> None:
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=False)
    plain = torch.optim.SGD(bare[0].parameters(), lr=0.1)
    ours = OffloadOptimizer(model, torch.optim.SGD, params=model[0].parameters(), lr=0.1)
    plain.add_param_group({"params": list(bare[1].parameters()), "lr": 0.01})
    ours.add_param_group({"params": list(model[1].parameters()), "lr": 0.01})
    x = torch.randn(3, WIDTH)
    assert train(model, ours, [x, x]) == train(bare, plain, [x, x])
    assert_equal(bare, model)


def test_the_dicts_and_tensors_of_groups_are_the_callers(home: str) -> None:
    """Defect: they were copied, so a loop that wrote to them trained with the first rate."""
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=False)
    batches = [torch.randn(3, WIDTH) for _ in range(3)]
    for net in (bare, model):
        group: dict[str, Any] = {"params": net[0].parameters(), "lr": 0.1}
        added: dict[str, Any] = {"params": net[1].parameters()}
        rate = torch.tensor(0.1)
        if net is bare:
            optimizer: torch.optim.Optimizer = torch.optim.SGD([group], lr=rate)
        else:
            optimizer = OffloadOptimizer(model, torch.optim.SGD, params=[group], lr=rate)
        optimizer.add_param_group(added)
        for x in batches:
            train(net, optimizer, [x])
            group["lr"] *= 0.1
            added["momentum"] = 0.9
            rate.mul_(0.1)
    assert_equal(bare, model)


class Simple(torch.optim.Optimizer):
    """What the classes below share: a loop over groups and parameters with a gradient."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            scale = self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"] * scale)

    def begin(self, group: dict[str, Any]) -> float:
        return 1.0

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(gradient, alpha=-lr)


class Coupling(Simple):
    """The rate comes from all parameters of a group together, after a begin in which it does not depend on them."""

    def begin(self, group: dict[str, Any]) -> float:
        norms = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
        group["d"] = group.get("d", 0.0) + sum(norms)
        return 1 / max(group["d"], 1e-3) if group["d"] > 1e6 else 1.0


class Joining(Simple):
    """Clips by the norm of all gradients, which it keeps nowhere."""

    def begin(self, group: dict[str, Any]) -> float:
        norms = [p.grad.norm() for each in self.param_groups for p in each["params"] if p.grad is not None]
        return 1.0 if not norms else min(1.0, 1.0 / float(torch.stack(norms).norm()))


class Drawing(Simple):
    """Adds noise."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        p.add_(gradient + torch.randn_like(gradient), alpha=-lr)


class Packed(Tensor):
    """Stands for a tensor whose memory is not what its type says."""


class Packing(Simple):
    """A state that no file can hold."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        state["memory"] = gradient.clone().as_subclass(Packed)
        p.add_(gradient, alpha=-lr)


class Shared(Simple):
    """Keeps a state that belongs to no parameter."""

    def begin(self, group: dict[str, Any]) -> float:
        self.state["all"] = {"steps": 1}
        return 1.0


class Own(Simple):
    """Does something with the closure."""

    def __init__(self, params: Any, calls: Any = None) -> None:
        super().__init__(params, lr=0.1)
        self.calls = calls

    def step(self, closure: Any = None) -> Any:
        if closure is not None and self.calls == "after":
            super().step()
        loss = None
        for _ in range(0 if closure is None else {"twice": 2, "never": 0}.get(self.calls, 1)):
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


def closure_of(
    model: Any, optimizer: Any, seed: int, *, max_norm: float | None = None, fails: bool = False
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        torch.manual_seed(seed)
        loss: torch.Tensor = (model(torch.randn(5, WIDTH)) - 1).pow(2).mean()
        if fails:
            raise OSError("a file of the data is gone")
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return loss

    return closure


@pytest.mark.parametrize("name", ["sgd", "adamw", "own"])
@pytest.mark.parametrize(
    "choices", [{}, {"max_norm": 0.1}, {"update_in_backward": True}, {"memory": "64MiB"}, {"failing": True}], ids=str
)
def test_a_closure_is_called_once_before_the_step(name: str, choices: dict[str, Any], home: str) -> None:
    kind, arguments = (Own, {}) if name == "own" else CLASSES[name]
    if kind is torch.optim.AdamW:
        arguments = {**arguments, "fused": True}
    bare = build(["linear", "dropout", "linear"])
    memory = {"memory": choices["memory"]} if "memory" in choices else {"num_slices": 3, "checkpoint_activation": True}
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, **memory)
    max_norm, in_backward = choices.get("max_norm"), choices.get("update_in_backward", False)
    ours = OffloadOptimizer(model, kind, max_norm=max_norm, update_in_backward=in_backward, **arguments)
    plain = kind(bare.parameters(), **arguments)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (plain, ours)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # passes the closure on
    step = ours.step if in_backward else partial(scaler.step, ours)
    for seed in range(3):
        if choices.get("failing"):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with pytest.raises(OSError, match="a file of the data is gone"):
                ours.step(closure_of(model, ours, seed, fails=True))
            torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
            assert ours.steps == seed
        expected = plain.step(closure_of(bare, plain, seed, max_norm=max_norm))
        assert torch.equal(step(closure_of(model, ours, seed)), expected)
        for schedule in schedules:
            schedule.step()
    exact = {"rtol": 0, "atol": 0} if max_norm is None and name != "adamw" else {}
    torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()), **exact)


@pytest.mark.parametrize("calls", ["twice", "never", "after", "fail"])
def test_a_class_that_does_more_with_a_closure_is_refused_before_it_is_called(calls: str) -> None:
    def step(self: Any, closure: Any = None) -> None:
        raise AttributeError("no line search")

    kind = type("Failing", (Own,), {"step": step}) if calls == "fail" else Own
    model = OffloadModel(build(["linear"]), "cpu", num_slices=2, checkpoint_activation=False)
    optimizer = OffloadOptimizer(model, kind, calls=calls)
    reason = {"twice": "2 times", "never": "0 times", "after": "writes parameters", "fail": "no line search"}[calls]
    with pytest.raises(ValueError, match=f"{reason}.*Call the closure yourself, then step"):
        optimizer.step(lambda: pytest.fail("it ran"))


def test_an_optimizer_is_not_copied_away_from_its_model() -> None:
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(Pair().ours)


# --- classes that are not of torch ------------------------------------------------------------------------------------


def pair_of(home: str, kind: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """(bare model, its optimizer, the offloaded model, ours), with two groups, one of which is frozen."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).to(dtype)
    bare[3][0].bias.requires_grad_(False)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=4, checkpoint_activation=True)
    plain = kind([{"params": [bare[3][0].bias]}, {"params": list(bare.parameters())[:-1]}], **arguments)
    groups = [{"params": model[3][0].bias}, {"params": list(model.parameters())[:-1]}]
    ours = OffloadOptimizer(model, kind, params=groups, **arguments)
    return bare, plain, model, ours


def backward(step: int, dtype: torch.dtype, *models: nn.Module) -> None:
    for model in models:
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x.to(dtype)).float().pow(2).mean().backward()


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (Coupling, RuntimeError, r"Coupling computes \['d'\] of group 1 from all parameters"),
        (Shared, RuntimeError, "Shared keeps states that belong to no parameter"),
        (Packing, TypeError, "Packing keeps state 'memory' of parameter"),
    ],
)
def test_what_no_home_or_no_order_of_updates_can_do_is_refused(home: str, kind: Any, error: Any, match: str) -> None:
    _, _, model, ours = pair_of(home, kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(0, torch.float32, model)
    if kind is Packing and home == "cpu":  # a state that no file can hold
        ours.step()
        return
    with pytest.raises(error, match=match):
        ours.step()
    if kind is Packing:
        for name, parameter in zip(before, [p for s in model._homes.shards for p in s.parameters], strict=True):
            assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_sixteen_bit_parameters_are_updated_as_the_plain_class_does(
    home: str, kind: type[torch.optim.Optimizer]
) -> None:
    bare, plain, model, ours = pair_of(home, kind, torch.bfloat16, lr=0.05)
    for step in range(6):
        backward(step, torch.bfloat16, bare, model)
        advance(plain, ours)
    torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Joining, Drawing])
def test_a_class_that_updates_parameters_otherwise_together_is_refused(kind: Any) -> None:
    """Defect: each part was clipped by its own norm. The trial draws no number of the user's."""
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=f"{kind.__name__} updates two parameters otherwise together than apart"):
        OffloadOptimizer(OffloadModel(build(["linear"]), "cpu", num_slices=2), kind)
    model = OffloadModel(build(["linear"]), "cpu", num_slices=2)
    torch.set_rng_state(before)
    for accepted in (Coupling, Packing, Shared, Own, RowWiseAdagrad):
        OffloadOptimizer(model, accepted)
    assert torch.equal(before, torch.get_rng_state())


# --- which classes may update parts of parameters: found by trying ----------------------------------------------------


class Lamb(torch.optim.SGD):
    """Scales its step by the norm of the parameter."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.norm() / p.grad.norm() * p.grad


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.ASGD,
    ],
)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.1}])
def test_elementwise_classes_are_accepted(kind: Any, options: dict[str, Any]) -> None:
    if kind is torch.optim.Rprop and "weight_decay" in options:
        options = {}
    check_elementwise(kind, {"lr": 0.1, **options}, {})


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, getattr(torch.optim, "Muon", Lamb), Lamb])
def test_class_that_needs_whole_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} updates a matrix differently as a whole and in parts"):
        check_elementwise(kind, {"lr": 0.1}, {})


def test_class_that_cannot_be_tried_is_refused() -> None:
    with pytest.raises(TypeError, match="SparseAdam cannot be tried"):
        check_elementwise(torch.optim.SparseAdam, {"lr": 0.1}, {})


def test_arguments_of_the_constructor_are_used() -> None:
    with pytest.raises(TypeError, match="cannot be tried"):
        check_elementwise(torch.optim.SGD, {}, {"lr": -1.0})


def test_buffers_of_updates_take_no_more_where_no_slot_keeps_the_weights(tmp_path: Path) -> None:
    """Weights are read into buffers then, beside gradients and moments: of smaller blocks."""
    held = {}
    for dtype in (None, torch.bfloat16):
        model = OffloadModel([nn.Linear(1024, 2048) for _ in range(2)], "cpu", tmp_path / str(dtype), param_dtype=dtype)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW)
        held[dtype] = optimizer.update_block_bytes * (3 if dtype is None else 4)
    assert held[torch.bfloat16] == pytest.approx(held[None], rel=0.01)
