"""An OffloadOptimizer trains like the plain optimizer after clip_grad_norm_: whatever the loop does, when it runs."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.planning.plan import Kind
from tests.offload.fuzz.models import ActNorm
from tests.offload.late import LateLane
from tests.offload.open_files import open_files
from tests.offload.pair import Pair, pending
from tests.offload.planning.proof import validate
from tests.offload.side_by_side import train
from tests.offload.zoo import WIDTH, build

# --- when updates run -------------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Updates run only when they are waited for; returns the tokens of those that ran."""
    lane = LateLane()
    monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: lane)
    return lane.log


def test_step_returns_before_anything_is_updated(home: str, held: list[str]) -> None:
    pair = Pair("adamw", home)
    pair.do("backward", "step", "zero", "model_zero")
    assert held == []
    assert pending(pair.model) == [0, 1, 2, 3]
    pair.eval()
    assert sorted(held) == ["U0", "U1", "U2", "U3"]
    assert pending(pair.model) == []
    pair.assert_equal()


def test_a_learning_rate_in_a_tensor_is_that_of_its_step(home: str, held: list[str]) -> None:
    """Schedules write into such a tensor in place."""
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=False)
    plain = torch.optim.SGD(bare.parameters(), lr=torch.tensor(0.1))
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=torch.tensor(0.1))
    for run, optimizer in ((bare, plain), (model, ours)):
        run(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"].fill_(1e6)
    assert all(map(torch.equal, bare.parameters(), model.parameters()))


def _copied(found: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in dict(found).items()}


def _names(net: nn.Module) -> list[str]:
    return [".".join(filter(None, (path, key))) for path, m in net.named_modules() for key in m._parameters]


#: How code reads the weights of ``net``.
READS: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "state_dict": lambda net: _copied(net.state_dict()),
    "named_parameters": lambda net: _copied(net.named_parameters()),
    "parameters": lambda net: _copied(zip(dict(net.state_dict()), net.parameters(), strict=True)),
    "attributes": lambda net: _copied((n, functools.reduce(getattr, n.split("."), net)) for n in _names(net)),
    "pickle": lambda net: _copied(pickle.loads(pickle.dumps(net)).state_dict()),
    "parts": lambda net: {f"{k}.{n}": v for k, m in net.named_children() for n, v in _copied(m.state_dict()).items()},
    "copied parts": lambda net: {
        f"{k}.{n}": v for k, m in net.named_children() for n, v in copy.deepcopy(m).state_dict().items()
    },
    "registers": lambda net: {
        ".".join(filter(None, (path, k))): v
        for path, m in net.named_modules()
        for k, v in _copied(m._parameters).items()
    },
    "loaded in part": lambda net: (net.load_state_dict({}, strict=False), _copied(net.state_dict()))[1],
    "in a thread": lambda net: ThreadPoolExecutor(1).submit(lambda: _copied(net.state_dict())).result(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("of", ["an optimizer", "a collected optimizer"])
def test_whatever_reads_weights_finds_those_of_the_last_step(read: str, of: str, home: str, held: list[str]) -> None:
    bare = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.5)
    for run, step in ((bare, torch.optim.SGD(bare.parameters(), lr=0.5).step), (model, optimizer.step)):
        run(torch.ones(2, WIDTH)).sum().backward()
        step()
    assert pending(model)
    if of == "a collected optimizer":
        del run, step, optimizer
    torch.testing.assert_close(READS[read](model), dict(bare.state_dict()), rtol=0, atol=0)


def test_what_a_collected_model_left_pending_ends_with_the_layers(tmp_path: Path) -> None:
    """Its files are there until then, and no longer."""
    pair = Pair("adamw", f"{tmp_path}/")
    pair.backward()
    pair.step()
    layers = nn.ModuleList(pair.model)
    del pair.ours, pair.model
    assert open_files(tmp_path, "weights")
    for expected, got in zip(pair.bare.parameters(), layers.parameters(), strict=True):
        pair.assert_close(got, expected)
    gc.collect()
    assert not open_files(tmp_path)


HOLDERS: dict[str, Callable[[OffloadModel], Any]] = {
    "a list": lambda model: list(model.parameters()),
    "a gradient": lambda model: next(p.grad for p in model.parameters()),
    "a view": lambda model: next(model.parameters()).detach(),
    "an array": lambda model: next(model.parameters()).detach().numpy(),
    "a plain optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
}


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_a_step_finishes_at_once_as_long_as_others_hold_parameters(holder: str, tmp_path: Path) -> None:
    pair = Pair("adamw", f"{tmp_path}/")
    for _ in range(2):
        pair.backward()
        kept = HOLDERS[holder](pair.model)
        pair.step()
        assert pending(pair.model) == []
        del kept
        pair.do("zero", "backward", "step")
        assert pending(pair.model) == [0, 1, 2, 3]
        pair.zero()


@pytest.mark.parametrize("loop", ["schedule", "scaler", "clip", "accumulation", "closure"])
def test_ordinary_loops_keep_updates_pending(loop: str, tmp_path: Path) -> None:
    model = OffloadModel(build(["linear", "linear"]), "cpu", tmp_path, num_slices=4, checkpoint_activation=True)
    ours = OffloadOptimizer(model, torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (step + 1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=loop == "scaler")

    def backward() -> Any:
        loss = model(torch.randn(3, WIDTH)).pow(2).mean()
        scaler.scale(loss).backward()
        return loss

    for step in range(4):
        ours.zero_grad()
        for _ in range({"accumulation": 2, "closure": 0}.get(loop, 1)):
            loss = backward()  # noqa: F841, which is kept
        if loop == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(ours, *([backward] if loop == "closure" else []))
        scaler.update()
        if loop == "schedule":
            schedule.step()
        assert pending(model) == [0, 1, 2, 3], step


# --- order and bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [False, True])
def test_updates_run_in_the_order_of_the_plan(home: str, tmp_path: Path, in_backward: bool) -> None:
    model = OffloadModel(build(["linear", "linear"]), "cpu", home, num_slices=4, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, update_in_backward=in_backward)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    plan = model.plan()
    validate(plan)
    kind = Kind.UPDATE_IN_BACKWARD if in_backward else Kind.UPDATE
    step()
    with model.trace(tmp_path / "trace.json") as events:
        step()
        optimizer.synchronize()
    ran = [event.token for event in sorted(events, key=lambda e: e.begin) if event.track == "update lane"]
    # In host memory, updates begin at once at step(), so this trace also holds those that its own step decided.
    assert ran[-4:] == [str(action) for action in plan.actions if action.kind is kind]


@pytest.mark.parametrize("slots", [2, 3])
def test_an_update_in_backward_reads_no_weights_that_are_in_a_slot(tmp_path: Path, slots: int) -> None:
    """16 bytes are read and 12 written for each parameter, less what slots keep between the passes."""
    policy = MemoryPolicy.fixed(slots=slots)
    pair = Pair("adamw", f"{tmp_path}/", kinds=("linear", "linear"), memory=policy, update_in_backward=True)
    for _ in range(3):
        before = pair.model.statistics()
        pair.do("backward", "step", "zero")
    after = pair.model.statistics()
    count = sum(p.numel() for p in pair.model.parameters())
    cached = sum(s.parameter.numel() for shard in pair.model._homes.shards[-slots:] for s in shard.own)
    assert after.bytes_moved - before.bytes_moved == 28 * count - 4 * cached
    assert after.update_bytes_read - before.update_bytes_read == 8 * count
    pair.assert_equal()


@pytest.mark.parametrize("waiting", [2, 4])
def test_gradients_that_wait_in_memory_are_neither_written_nor_read(tmp_path: Path, waiting: int) -> None:
    shard_bytes = (WIDTH * WIDTH + WIDTH) * 4
    pair = Pair(
        "adamw",
        f"{tmp_path}/",
        kinds=("linear", "linear"),
        max_norm=0.1,
        memory=MemoryPolicy.fixed(gradient_bytes=waiting * shard_bytes + 3),
    )
    pair.do("backward", "step", "zero", "backward", "backward", "step", "zero")
    pair.ours.synchronize()
    before = pair.model.statistics()
    pair.do("backward", "step", "assert_equal", "zero")
    after = pair.model.statistics()
    assert after.bytes_stored - before.bytes_stored == (4 - waiting) * shard_bytes
    # Nothing loads these updates' weights: those are read for the update itself.
    assert after.update_bytes_read - before.update_bytes_read == 4 * 3 * shard_bytes + (4 - waiting) * shard_bytes
    pair.assert_equal_states()


# --- updates in backward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["a second backward", "two forwards"])
def test_what_would_update_twice_is_refused_before_anything_changes(home: str, how: str) -> None:
    pair = Pair("sgd", home, update_in_backward=True)
    loss = pair.model(pair.batch()).sum()
    if how == "two forwards":
        loss, words = loss + pair.model(pair.batch()).sum(), "more forwards of this model still need"
    else:
        del loss
        pair.backward()
        loss, words = pair.model(pair.batch()).sum(), "a second backward before step"
    with pytest.raises(RuntimeError, match=words):
        loss.backward()
    del loss
    gc.collect()
    pair.do(*(["step", "zero"] if how == "a second backward" else []), "backward", "step", "zero")
    pair.assert_equal()


def test_a_backward_that_fails_half_way_leaves_an_optimizer_that_says_so(home: str) -> None:
    pair = Pair("sgd", home, update_in_backward=True)
    handle = next(iter(pair.model.children())).register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = pair.model(pair.batch()).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    loss = pair.model(pair.batch()).sum()
    with pytest.raises(RuntimeError, match=r"updated the shards \[3, 2, 1\]"):
        loss.backward()
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        pair.ours.step()


@pytest.mark.parametrize("repeat", range(10))
def test_an_update_in_backward_waits_for_the_load_of_a_shard_whose_backward_needs_no_weights(
    tmp_path: Path, repeat: int
) -> None:
    """Nothing else waits for it: the gradient of ``x + shift`` needs none. A thread loads, so it is tried often."""
    bare = nn.Sequential(ActNorm(WIDTH), nn.Linear(WIDTH, WIDTH), ActNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    policy = MemoryPolicy.fixed(slots=3, graph_bytes=1 << 20)
    model = OffloadModel(copy.deepcopy(bare), "cpu", tmp_path, 4, True, memory=policy)
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        assert train(model, ours, [x]) == train(bare, plain, [x])
        assert all(map(torch.equal, model.parameters(), bare.parameters()))


# --- what it switches on ends with it ---------------------------------------------------------------------------------


def test_updates_in_backward_end(home: str) -> None:
    model = OffloadModel(build(["linear", "linear"]), "cpu", home, 2, True)
    optimizer: Any = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    assert model.updates_in_backward
    with pytest.raises(ValueError, match="has an optimizer with update_in_backward=True already"):
        OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)
    model(torch.ones(3, WIDTH)).square().mean().backward()
    del optimizer
    gc.collect()
    assert not model.updates_in_backward
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # without a step in between, which an optimizer that updates in backward refuses
        model(torch.ones(3, WIDTH)).square().mean().backward()
    for then, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(then, now)
        assert now.grad is not None
    OffloadOptimizer(model, torch.optim.SGD, lr=0.1, update_in_backward=True)


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_what_it_decided_is_applied_and_then_threads_and_files_end(tmp_path: Path, update_in_backward: bool) -> None:
    others = set(threading.enumerate())
    pair = Pair("adamw", f"{tmp_path}/", update_in_backward=update_in_backward)
    pair.backward()
    pair.step()
    pair.zero()
    assert pending(pair.model) == ([] if update_in_backward else [0, 1, 2, 3])
    optimizer = weakref.ref(pair.ours)
    del pair.ours
    gc.collect()
    assert optimizer() is None
    pair.eval()  # loads every shard, so what is pending is applied
    assert pending(pair.model) == []
    for thread in set(threading.enumerate()) - others:
        if thread.name == "offload-update":
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert not open_files(tmp_path, "shard0-states")
    pair.assert_equal()


class _Added(nn.Module):
    """Its two vectors have one gradient; that of its scales is one number in all places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(8, 8), *(nn.Parameter(torch.randn(1, 8)) for _ in range(2))
        self.scales = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.first + self.second + self.scales.sum()


@pytest.mark.parametrize("on_disk", [False, True])
def test_gradients_that_autograd_shares_are_clipped_and_accumulated_as_in_the_plain_model(
    on_disk: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(_Added() for _ in range(3)))
    model = OffloadModel(copy.deepcopy(plain), "cpu", f"{tmp_path}/" if on_disk else "cpu", 3, True)
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=1.0, max_norm=0.01)
    for _ in range(2):
        x = torch.randn(1, 8)
        for each in (plain, model, plain, model):
            each(x).square().sum().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
