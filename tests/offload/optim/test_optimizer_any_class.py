"""Classes that are not of ``torch.optim``: counters in groups, states that change, parameters that others hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.pair import pending

WIDTH = 8


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A home where updates stay pending until they are needed."""
    return f"{tmp_path}/"


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
    """The rate comes from all parameters of a group together."""

    def begin(self, group: dict[str, Any]) -> float:
        norms = [float(p.grad.norm()) for p in group["params"] if p.grad is not None]
        group["d"] = group.get("d", 0.0) + sum(norms)
        return 1 / max(group["d"], 1e-3)


class Packed(Tensor):
    """Stands for a tensor whose memory is not what its type says."""


class Packing(Simple):
    """A state that no file can hold."""

    def update(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        state["memory"] = gradient.clone().as_subclass(Packed)
        p.add_(gradient, alpha=-lr)


def pair(home: str, kind: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """(bare model, its optimizer, the offloaded model, ours), with two groups, one of which is frozen."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).to(dtype)
    bare[3][0].bias.requires_grad_(False)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=4, checkpoint_activation=True)
    plain = kind([{"params": [bare[3][0].bias]}, {"params": list(bare.parameters())[:-1]}], **arguments)
    ours = OffloadOptimizer(model, kind, params=[{"params": "3.0.bias"}, {"params": "*"}], **arguments)
    return bare, plain, model, ours


def backward(step: int, *models: nn.Module) -> None:
    for model in models:
        dtype = torch.float32 if isinstance(model, OffloadModel) else next(iter(model.parameters())).dtype
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        dtype = torch.bfloat16 if any(t.dtype == torch.bfloat16 for t in model.state_dict().values()) else dtype
        model(x.to(dtype)).float().pow(2).mean().backward()


def assert_same(bare: nn.Module, plain: Any, model: nn.Module, ours: Any) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()), rtol=0, atol=0)
    one, other = plain.state_dict(), ours.state_dict()
    for group in (*one["param_groups"], *other["param_groups"]):
        group.pop("differentiable", None)  # torch adds it to the defaults at a load
    assert [{**g, "params": None} for g in other["param_groups"]] == [
        {**g, "params": None} for g in one["param_groups"]
    ]


def test_a_class_that_couples_parameters_is_refused(home: str) -> None:
    _, _, model, ours = pair(home, Coupling)
    backward(0, model)
    with pytest.raises(RuntimeError, match=r"Coupling computes \['d'\] of group 1 from all parameters"):
        ours.step()


class Shared(Simple):
    """Keeps a state that belongs to no parameter."""

    def begin(self, group: dict[str, Any]) -> float:
        self.state["all"] = {"steps": 1}
        return 1.0


def test_a_state_that_belongs_to_no_parameter_is_refused(home: str) -> None:
    """No ``state_dict()`` would hold it."""
    _, _, model, ours = pair(home, Shared)
    backward(0, model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Shared keeps states that belong to no parameter"):
            ours.step()


def test_a_state_that_no_file_can_hold_is_refused_before_anything_is_written(home: str) -> None:
    bare, plain, model, ours = pair(home, Packing)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    backward(0, bare, model)
    if home == "cpu":
        ours.step()
        plain.step()
        assert_same(bare, plain, model, ours)
        return
    with pytest.raises(TypeError, match="Packing keeps state 'memory' of parameter"):
        ours.step()
    for name, parameter in zip(before, [p for s in model._homes.shards for p in s.parameters], strict=True):
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_sixteen_bit_parameters_are_updated_as_the_plain_class_does(
    home: str, kind: type[torch.optim.Optimizer]
) -> None:
    bare, plain, model, ours = pair(home, kind, torch.bfloat16, lr=0.05)
    for step in range(6):
        backward(step, bare, model)
        for optimizer in (plain, ours):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(dict(model.state_dict()), dict(bare.state_dict()), rtol=0, atol=0)


# --- what others hold -------------------------------------------------------------------------------------------------


HOLDERS: dict[str, Callable[[OffloadModel], Any]] = {
    "a list": lambda model: list(model.parameters()),
    "one parameter": lambda model: next(model.parameters()),
    "a gradient": lambda model: next(p.grad for p in model.parameters()),
    "a view": lambda model: next(model.parameters()).detach(),
    "an array": lambda model: next(model.parameters()).detach().numpy(),
    "a plain optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
}


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_a_step_finishes_at_once_as_long_as_others_hold_parameters(disk: str, holder: str) -> None:
    _, _, model, ours = pair(disk, torch.optim.AdamW)
    for step in range(3):
        ours.zero_grad()
        backward(step, model)
        kept = HOLDERS[holder](model)
        ours.step()
        assert pending(model) == []
        del kept
        ours.zero_grad()
        backward(step, model)
        ours.step()
        assert pending(model) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "loop", ["loss kept", "item", "schedule", "scaler", "clip", "rates", "max_norm", "accumulation"]
)
def test_ordinary_loops_keep_updates_pending(disk: str, loop: str) -> None:
    arguments: dict[str, Any] = {"max_norm": 0.1} if loop == "max_norm" else {}
    _, _, model, _ = pair(disk, torch.optim.AdamW)
    ours = OffloadOptimizer(model, torch.optim.AdamW, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (step + 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        ours.zero_grad()
        for _ in range(2 if loop == "accumulation" else 1):
            loss = model(torch.randn(3, WIDTH)).pow(2).mean()
            if loop == "scaler":
                scaler.scale(loss).backward()
            else:
                loss.backward()
        if loop == "item":
            loss = loss.item()
        if loop == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if loop == "rates":
            for group in ours.param_groups:
                group["lr"] = 0.1 / (step + 1)
        if loop == "scaler":
            scaler.step(ours)
            scaler.update()
        else:
            ours.step()
        if loop == "schedule":
            schedule.step()
        assert pending(model) == [0, 1, 2, 3], step
