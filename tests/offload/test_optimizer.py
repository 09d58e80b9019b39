"""An OffloadOptimizer trains like the plain optimizer after clip_grad_norm_, whatever the loop does in between."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import offload.optim.staged
from offload import OffloadModel, OffloadOptimizer
from tests.offload.zoo import WIDTH, build

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "eps": 1e-4}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "eps": 1e-4}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-4}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
}

ACTIONS = ["backward", "backward", "step", "step", "zero", "zero in place", "model.zero", "eval", "schedule", "look"]


class Pair:
    """A bare model with the plain optimizer, and the same offloaded; both do what they are told."""

    def __init__(
        self,
        name: str = "adamw",
        home: str = "cpu",
        *,
        max_norm: float | None = None,
        kinds: tuple[str, ...] = ("linear", "dropout", "unused", "linear"),
        tied: bool = False,
        slices: int = 4,
        grouped: bool = False,
        recompute: bool = True,
        **more: Any,
    ) -> None:
        kind, arguments = CLASSES[name]
        self.max_norm = max_norm
        self.bare = build(kinds, tied=tied)
        self.model = OffloadModel(
            copy.deepcopy(self.bare), "cpu", home, num_slices=slices, checkpoint_activation=recompute
        )
        groups: Any = None
        plain: Any = self.bare.parameters()
        if grouped:
            named = dict(self.bare.named_parameters())
            plain = [
                {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0, "lr": 0.003},
                {"params": [p for n, p in named.items() if not n.endswith("bias")]},
            ]
            groups = [{"params": "*bias", "weight_decay": 0.0, "lr": 0.003}, {"params": "*"}]
        self.plain = kind(plain, **arguments)
        self.ours = OffloadOptimizer(self.model, kind, params=groups, max_norm=max_norm, **arguments, **more)
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (self.plain, self.ours)]
        self.exact = name in ("sgd", "momentum") and max_norm is None and not tied
        self.count = 0

    def do(self, action: str) -> None:
        getattr(self, action.replace(" ", "_").replace(".", "_"))()

    def batch(self) -> torch.Tensor:
        self.count += 1
        return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(self.count))

    def backward(self) -> None:
        x = self.batch()
        for run in (self.bare, self.model):
            torch.manual_seed(self.count)
            (run(x) - 1).pow(2).mean().backward()

    def step(self) -> None:
        if self.max_norm is not None:
            members = [p for group in self.plain.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(members, self.max_norm)
        self.plain.step()
        self.ours.step()
        if self.max_norm is not None:
            torch.testing.assert_close(self.ours.last_norm, norm, rtol=1e-6, atol=1e-7)

    def zero(self) -> None:
        self.plain.zero_grad()
        self.ours.zero_grad()

    def zero_in_place(self) -> None:
        self.plain.zero_grad(set_to_none=False)
        self.ours.zero_grad(set_to_none=False)

    def model_zero(self) -> None:
        self.bare.zero_grad()
        self.model.zero_grad()

    def eval(self) -> None:
        x = self.batch()
        results = []
        for run in (self.bare, self.model):
            run.eval()
            with torch.no_grad():
                results.append(run(x))
            run.train()
        self.close(results[1], results[0])

    def schedule(self) -> None:
        for schedule in self.schedules:
            schedule.step()

    def look(self) -> None:
        self.compare()

    def close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """1e-6 of the largest number of a tensor; or nothing at all."""
        atol = 0.0 if self.exact else 1e-6 * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)

    def compare(self) -> None:
        for (name, b), c in zip(self.bare.named_parameters(), self.model.parameters(), strict=True):
            self.close(c, b)
            assert (b.grad is None) == (c.grad is None), name
            if b.grad is not None:
                self.close(c.grad, b.grad)

    def compare_states(self) -> None:
        expected, actual = self.plain.state_dict(), self.ours.state_dict()
        assert actual["param_groups"] == expected["param_groups"]
        assert actual["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            assert actual["state"][key].keys() == state.keys()
            for name, value in state.items():
                self.close(torch.as_tensor(actual["state"][key][name]), torch.as_tensor(value))


@pytest.fixture
def small_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.optim.staged, "BITE_BYTES", 96)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(CLASSES)),
    max_norm=st.sampled_from([None, 0.2, 1e3]),
    on_disk=st.booleans(),
    tied=st.booleans(),
    grouped=st.booleans(),
    slices=st.integers(1, 6),
    bite_bytes=st.sampled_from([64, 300, 16 << 20]),
    recompute=st.booleans(),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=3, max_size=14),
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_any_sequence_trains_like_the_plain_optimizer(
    name: str,
    max_norm: float | None,
    on_disk: bool,
    tied: bool,
    grouped: bool,
    slices: int,
    bite_bytes: int,
    recompute: bool,
    actions: list[str],
) -> None:
    if name in ("adafactor", "asgd", "sgd", "adagrad") and grouped:
        grouped = False  # they take no weight_decay of this form, or need none
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.optim.staged, "BITE_BYTES", bite_bytes)
        home = folder if on_disk else "cpu"
        pair = Pair(name, home, max_norm=max_norm, tied=tied, grouped=grouped, slices=slices, recompute=recompute)
        for action in ["backward", "step", *actions]:
            pair.do(action)
        pair.compare()
        pair.compare_states()


def test_sgd_is_bit_equal_and_clipping_uses_the_very_coefficient(home: str) -> None:
    for max_norm in (None, 0.1):
        pair = Pair("momentum", home, max_norm=max_norm)
        pair.exact = True
        for _ in range(4):
            for action in ("backward", "backward", "step", "zero"):
                pair.do(action)
        pair.compare()


# --- what is pending, and who finishes it -------------------------------------------------------------------------


def pending(model: OffloadModel) -> list[int]:
    return [shard.index for shard in model._walk.shards if shard.pending is not None]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates run only when somebody waits for them; returns the tokens of those that ran."""
    from tests.offload.late import LateLane

    lane = LateLane()
    monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: lane)
    return lane.log


def test_step_returns_before_anything_is_updated(home: str, held: list[str]) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    pair.zero()
    assert held == []
    assert pending(pair.model) == [0, 1, 2, 3]
    pair.eval()
    assert sorted(held) == ["U0", "U1", "U2", "U3"]
    assert pending(pair.model) == []
    pair.compare()


@pytest.mark.parametrize(
    "read",
    [
        lambda pair: list(pair.model.parameters()),
        lambda pair: next(pair.model.named_parameters()),
        lambda pair: pair.model.state_dict(),
        lambda pair: nn.ModuleList([pair.model]).state_dict(),
        lambda pair: list(nn.ModuleList([pair.model]).parameters()),
        lambda pair: copy.deepcopy(pair.model),
        lambda pair: pair.model.load_state_dict(pair.bare.state_dict()),
        lambda pair: nn.ModuleList([pair.model]).load_state_dict(nn.ModuleList([pair.bare]).state_dict()),
        lambda pair: pair.ours.state_dict(),
        lambda pair: pair.ours.load_state_dict(pair.plain.state_dict()),
        lambda pair: pair.ours.synchronize(),
        lambda pair: pair.ours.step(),
        lambda pair: pair.ours.zero_grad(set_to_none=False),
        lambda pair: pair.model.zero_grad(set_to_none=False),
        lambda pair: pair.model(torch.zeros(1, WIDTH)),
    ],
)
def test_whoever_reads_through_the_model_finishes_what_is_pending(home: str, held: list[str], read: Any) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    pair.zero()
    read(pair)
    assert pending(pair.model) == []
    assert len(held) == 4
    pair.compare()


def test_zero_grad_does_not_finish_what_is_pending(home: str, held: list[str]) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    pair.zero()
    pair.model_zero()
    assert len(pending(pair.model)) == 4


def test_a_schedule_that_steps_after_step_does_not_change_the_pending_update(home: str, held: list[str]) -> None:
    pair = Pair("sgd", home)
    for action in ("backward", "step", "schedule", "zero", "backward", "step", "zero"):
        pair.do(action)
    for group in pair.ours.param_groups:
        group["lr"] = 1e6
    for group in pair.plain.param_groups:
        group["lr"] = 1e6
    pair.compare()


def test_a_backward_after_step_belongs_to_neither_value_and_says_so(home: str) -> None:
    pair = Pair("sgd", home)
    pair.backward()
    loss = pair.model(pair.batch()).sum()
    pair.step()
    with pytest.raises(RuntimeError, match="changed in place between the forward and its backward"):
        loss.backward()
    pair.compare()


# --- features of torch.optim ---------------------------------------------------------------------------------------


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
    pair.compare()
    pair.compare_states()


def test_state_dicts_go_both_ways(home: str) -> None:
    first, second = Pair("amsgrad", home), Pair("amsgrad", home, slices=2)
    for action in ("backward", "step", "zero", "backward", "step", "zero"):
        first.do(action)
    for pair in (first, second):
        pair.bare.load_state_dict(first.bare.state_dict())
        pair.model.load_state_dict(first.bare.state_dict())
    second.plain.load_state_dict(copy.deepcopy(first.ours.state_dict()))
    second.ours.load_state_dict(first.plain.state_dict())
    second.compare_states()
    for action in ("backward", "step", "zero", "backward", "step"):
        second.do(action)
    second.compare()
    second.compare_states()
    first.compare_states()  # tensors were copied: what the second did is not seen in the first


def test_a_state_dict_of_other_groups_is_refused_and_changes_nothing(home: str) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    other = Pair("adamw", "cpu", grouped=True)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        pair.ours.load_state_dict(other.plain.state_dict())
    pair.compare_states()


def test_a_group_added_later_is_trained(home: str) -> None:
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3)
    plain = torch.optim.SGD(bare[0].parameters(), lr=0.1)
    ours = OffloadOptimizer(model, torch.optim.SGD, params=[{"params": "0.*"}], lr=0.1)
    plain.add_param_group({"params": list(bare[1].parameters()), "lr": 0.01})
    ours.add_param_group({"params": "1.*", "lr": 0.01})
    x = torch.randn(3, WIDTH)
    for run, optimizer in ((bare, plain), (model, ours)):
        for _ in range(2):
            optimizer.zero_grad()
            run(x).sum().backward()
            optimizer.step()
    for b, c in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(b, c)


def test_sparse_gradients_are_updated_or_refused_in_step(home: str) -> None:
    for kind, refused in ((torch.optim.SGD, False), (torch.optim.AdamW, True)):
        bare = nn.Sequential(nn.Embedding(12, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=True)
        optimizer = OffloadOptimizer(model, kind, lr=0.1)
        plain = kind(bare.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        for run in (bare, model):
            run(torch.tensor([[1, 5], [1, 2]])).sum().backward()
        if refused:
            with pytest.raises(RuntimeError, match="sparse gradients"):
                optimizer.step()
            assert pending(model) == []
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            continue
        plain.step()
        optimizer.step()
        for b, c in zip(bare.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(c, b)


def test_only_parameters_with_gradients_are_read_and_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that took no gradient is clean: its file is not written."""
    bare = build(["linear", "linear"])
    for p in bare[1].parameters():
        p.requires_grad_(False)
    model = OffloadModel(bare, "cpu", f"{tmp_path}/", num_slices=4)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    model(torch.randn(2, WIDTH)).sum().backward()
    written: list[str] = []
    write = offload.tier.disk.DiskBlock.write
    monkeypatch.setattr(
        offload.tier.disk.DiskBlock, "write", lambda self, *a: (written.append(self._path.name), write(self, *a))[1]
    )
    optimizer.step()
    optimizer.synchronize()
    names = {name.split("-", 1)[1] for name in written}
    assert names == {f"shard{j}-{what}" for j in (0, 2, 3) for what in ("weights", "states")}


def test_closures_are_refused_with_the_reason() -> None:
    pair = Pair("sgd")
    with pytest.raises(ValueError, match="call the closure yourself"):
        pair.ours.step(lambda: torch.zeros(()))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"optimizer_class": torch.optim.LBFGS}, TypeError, "needs a closure"),
        ({"optimizer_class": 3}, TypeError, "expected a class such as"),
        ({"optimizer_class": OffloadOptimizer}, TypeError, "expected a class such as"),
        ({"model": nn.Linear(1, 1)}, TypeError, "expected an OffloadModel"),
        ({"max_norm": 0.0}, ValueError, "expected a positive norm"),
        ({"max_norm": "1"}, TypeError, "expected a number"),
        ({"max_norm": 1.0, "update_in_backward": True}, ValueError, "exclude each other"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"params": "*.bias"}, TypeError, "iterable of parameters or groups"),
        ({"params": [{"params": "*.biases"}]}, ValueError, "no parameter is left that matches"),
        ({"params": [{"weight_decay": 0.1}]}, ValueError, "a group with the key 'params'"),
        ({"params": []}, ValueError, "at least one parameter"),
        ({"params": [nn.Parameter(torch.ones(1))]}, ValueError, "not among them"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: Any, error: type[Exception], match: str) -> None:
    model = OffloadModel(build(["linear"]), "cpu", num_slices=2)
    given = {"model": model, "optimizer_class": torch.optim.AdamW, **arguments}
    with pytest.raises(error, match=match):
        OffloadOptimizer(given.pop("model"), given.pop("optimizer_class"), **given)


def test_a_norm_is_read_again_when_a_gradient_was_written_to(home: str) -> None:
    pair = Pair("sgd", home, max_norm=0.1)
    pair.backward()
    for model in (pair.bare, pair.model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(3)
    pair.step()
    pair.compare()


def test_norms_come_with_the_gradients(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """step() reads no gradient: the sum of norms was made while they went home, over two backwards and tied layers."""
    pair = Pair("sgd", home, max_norm=0.1, tied=True, kinds=("linear",), slices=2)
    pair.backward()
    pair.backward()

    def never(gradient: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a gradient was read in step()")

    monkeypatch.setattr("offload.optim.optimizer.norm_of", never)
    pair.step()
    pair.compare()
