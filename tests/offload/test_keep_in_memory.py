"""Shards that rest in memory although their home is a file, or are used in place: the same numbers, without a load."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from offload.engine.block import RUNS_NOTED
from offload.storage.disk import DiskBlock, DiskTier
from offload.streaming.moves import HomeInUseError
from tests.offload.blocks.towers import assert_equal
from tests.offload.interrupts import interrupted, lines_of
from tests.offload.test_faults import Faults
from tests.offload.zoo import WIDTH

SHARDS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def layers(count: int = SHARDS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.LayerNorm(WIDTH)) for _ in range(count))
    )


def keep(model: OffloadModel, shards: Collection[int]) -> None:
    model._homes.keep_in_memory(shards)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss = (model(batch(seed)) - 1).pow(2).mean()
    loss.backward()
    return loss.detach()


def assert_states_equal(plain: torch.optim.Optimizer, ours: torch.optim.Optimizer) -> None:
    expected, states = plain.state_dict()["state"], ours.state_dict()["state"]
    assert expected.keys() == states.keys()
    for k, state in expected.items():
        assert state.keys() == states[k].keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[k][key])), (k, key)


def trained(
    home: Any, name: str, shards: int = SHARDS, **settings: Any
) -> tuple[nn.Module, OffloadModel, Any, OffloadOptimizer]:
    kind, arguments = OPTIMIZERS[name]
    bare = layers(shards)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, shards, **settings)
    return bare, model, kind(bare.parameters(), **arguments), OffloadOptimizer(model, kind, **arguments)


moves = st.none() | st.sets(st.integers(0, SHARDS - 1))


@settings(
    max_examples=30,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    recompute=st.booleans(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    steps=st.lists(
        st.tuples(moves, moves, moves, moves, st.sampled_from(["zero", "to zeros", "accumulate"])),
        min_size=3,
        max_size=5,
    ),
)
def test_any_shards_may_rest_in_memory_at_any_time_between_passes(
    home: str, recompute: bool, name: str, steps: list[Any]
) -> None:
    bare, model, plain, ours = trained(home, name, checkpoint_activation=recompute)
    parameters = [(key, id(p)) for key, p in model.named_parameters()]

    def move(shards: set[int] | None) -> None:
        if shards is not None:
            keep(model, shards)
            assert model._homes.streamer.in_place() == shards

    for k, (before_forward, before_backward, before_step, after_step, zero) in enumerate(steps):
        move(before_forward)
        losses = []
        for run in (bare, model):
            torch.manual_seed(k)
            losses.append((run(batch(k)) - 1).pow(2).mean())
        assert torch.equal(*losses)
        try:
            move(before_backward)
        except HomeInUseError:
            # Graphs of shards that were used in place refer to their homes: those of the first forwards, too, since a
            # layer that writes its weights there would write them again.
            assert not recompute or k < RUNS_NOTED
        for loss in losses:
            loss.backward()
        move(before_step)
        assert_equal(bare, model)
        plain.step()
        ours.step()
        move(after_step)
        if zero != "accumulate":
            plain.zero_grad(zero == "zero")
            ours.zero_grad(zero == "zero")
    assert_equal(bare, model)
    assert_states_equal(plain, ours)
    assert [(key, id(p)) for key, p in model.named_parameters()] == parameters


def in_memory(model: OffloadModel) -> list[bool]:
    return [not shard.blocking_io for shard in model._homes.shards]


def fails(move: Callable[[], None]) -> bool:
    try:
        move()
    except OSError as error:
        return error.strerror == "moving shards between file and memory: No space left on device"
    return False


@pytest.mark.parametrize(
    ("owner", "method"), [(DiskTier, "allocate"), (DiskBlock, "write"), (DiskBlock, "read_into")], ids=str
)
def test_a_disk_that_fails_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    bare, model, plain, ours = trained(f"{tmp_path}/", "adamw")
    keep(model, [0, 1])

    def step(k: int) -> None:
        for run, optimizer in ((bare, plain), (model, ours)):
            optimizer.zero_grad()
            backward(run, k)
            optimizer.step()

    step(0)
    for run in (bare, model):
        backward(run, 1)
    ours.synchronize()
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    faults = Faults(monkeypatch, owner, method, error)
    failed = 0
    for fatal in range(1, 100):
        files = sorted(path.name for path in tmp_path.rglob("*"))
        faults.calls, faults.fatal = 0, fatal
        if not fails(lambda: keep(model, [1, 2, 3])):
            break
        failed += 1
        error.with_traceback(None)  # its frames hold files that are about to be removed
        assert in_memory(model) == [True, True, False, False]
        assert sorted(path.name for path in tmp_path.rglob("*")) == files
        assert_equal(bare, model)
    assert failed
    assert in_memory(model) == [False, True, True, True]
    faults.fatal = -1
    step(2)
    assert_equal(bare, model)
    assert_states_equal(plain, ours)


def test_an_interrupt_at_any_line_moves_all_or_nothing(tmp_path: Path) -> None:
    bare, model, plain, ours = trained(f"{tmp_path}/", "momentum", checkpoint_activation=True)
    there: tuple[list[int], list[int]] = ([0, 1], [1, 2])
    keep(model, there[0])

    def step(k: int) -> None:
        for run, optimizer in ((bare, plain), (model, ours)):
            optimizer.zero_grad()
            backward(run, k)
            optimizer.step()

    step(0)
    ours.synchronize()
    lines = lines_of(lambda: keep(model, there[1]))
    keep(model, there[0])
    seen = {}
    for line in lines:
        seen.setdefault(line[:2], line)
    raised = 0
    lines = list(seen.values())[::2]
    for k, line in enumerate(lines):
        before = in_memory(model)
        wanted = there[before == [j in there[0] for j in range(SHARDS)]]
        raised += interrupted(lambda wanted=wanted: keep(model, wanted), line) == "raised"  # type: ignore[misc]
        assert in_memory(model) in (before, [j in wanted for j in range(SHARDS)]), line
        step(k + 1)
        assert_equal(bare, model)
    assert raised > 0.6 * len(lines)
    assert_states_equal(plain, ours)


HOLDERS: dict[str, Callable[[OffloadModel, OffloadOptimizer], object]] = {
    "a state_dict": lambda model, ours: model.state_dict(),
    "an array": lambda model, ours: next(model[1].parameters()).detach().numpy(),
    "a view of a state": lambda model, ours: ours.state[next(model[1].parameters())]["exp_avg"][0],
}


@pytest.mark.parametrize("into_memory", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_other_code_views_does_not_move(tmp_path: Path, holder: str, into_memory: bool) -> None:
    _, model, _, ours = trained(f"{tmp_path}/", "adamw")
    keep(model, [] if into_memory else [1])
    backward(model, 0)
    ours.step()
    ours.zero_grad()
    ours.synchronize()
    held = HOLDERS[holder](model, ours)
    with pytest.raises(HomeInUseError, match="other code holds views of their weights or optimizer states") as raised:
        keep(model, [1, 2] if into_memory else [])
    assert 1 in raised.value.shards
    assert in_memory(model) == [False, not into_memory, False, False]
    keep(model, [j for j in range(SHARDS) if not in_memory(model)[j]] if holder == "" else [1] * (not into_memory))
    del held
    keep(model, [1, 2] if into_memory else [])


def test_what_cannot_be_moved_is_refused() -> None:
    model = OffloadModel(layers(), "cpu", "cpu", SHARDS)
    with pytest.raises(ValueError, match=r"expected indices of 4 shards, got \[1, 4\]"):
        keep(model, [1, 4])
    handle = next(iter(model)).register_forward_hook(lambda *_: keep(model, [1]))
    with pytest.raises(RuntimeError, match="expected no running forward or backward"):
        model(batch())
    handle.remove()
    model(batch())
    model.close()
    with pytest.raises(RuntimeError, match="was closed"):
        keep(model, [1])
