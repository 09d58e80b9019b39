"""After an error of a home nothing is lost and nothing is applied twice."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import offload.optim.state_forms
import offload.optim.update_blocks
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.storage.disk import DiskBlock, DiskTier
from offload.streaming.lane import ThreadCopyLane
from tests.offload.pair import Pair, pending
from tests.offload.test_faults import Faults


def trained(
    folder: Path, form: tuple[Any, Any, Any], fault: tuple[type, str, int] | None = None, *, in_backward: bool = False
) -> list[Any]:
    """What two steps leave, the second one with a fault; what failed is repeated once."""
    weights, gradients, states = form
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    how = {"store_dtype": weights, "gradient_dtype": gradients, "memory": MemoryPolicy.fixed(slots=2)}
    model = OffloadModel(layers, "cpu", f"{folder}/", 3, **how)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.1, states=states)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 16)).pow(2).mean().backward()

    def twice(action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            action()

    with pytest.MonkeyPatch.context() as patch:
        for step in range(2):
            for at_update, action in enumerate((backward, optimizer.synchronize)):
                if step and fault and at_update != in_backward:
                    Faults(patch, *fault[:2], OSError(errno.EIO, "Input/output error")).fatal = fault[2]
                twice(action)
                if not at_update:
                    optimizer.step()
    stored = optimizer.state_dict()["state"].values()
    found = [*model.state_dict().values(), *(torch.as_tensor(v) for state in stored for v in state.values())]
    found = [value.clone() for value in found]
    model.close()
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["read_into", "write"]),
    fatal=st.integers(1, 30),
    weights=st.sampled_from([None, "split", torch.bfloat16]),
    gradients=st.sampled_from([None, torch.bfloat16]),
    states=st.sampled_from([None, torch.bfloat16, "8bit"]),
    update_block_bytes=st.sampled_from([64, 16 << 20]),
    in_backward=st.booleans(),
)
@example("read_into", 7, None, torch.bfloat16, None, 64, True)  # before the backward has loaded anything
def test_a_disk_that_fails_once_changes_no_bit_in_any_form(
    tmp_path: Path,
    method: str,
    fatal: int,
    weights: Any,
    gradients: Any,
    states: Any,
    update_block_bytes: int,
    in_backward: bool,
) -> None:
    form = (weights, gradients, states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", update_block_bytes)
        patch.setattr(offload.optim.state_forms, "LEAST_ELEMENTS", 32)
        expected = trained(tmp_path, form)
        found = trained(tmp_path, form, (DiskBlock, method, fatal), in_backward=in_backward)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def failing(pair: Pair, when: Callable[[], bool]) -> None:
    """Makes the arithmetic of the first shard's update fail, before or after it."""
    param_block = pair.ours.param_blocks[pair.model._homes.shards[0]][0]
    optimizer = param_block.prepare(pair.ours.options())
    step = type(optimizer).step

    def broken(*args: Any) -> None:
        if when():
            raise ArithmeticError("broken")
        step(optimizer)
        if when():
            raise ArithmeticError("broken")

    optimizer.step = broken  # type: ignore[method-assign]


def test_arithmetic_that_fails_half_way_is_noticed(home: str) -> None:
    """At home in host memory what is half done cannot be undone, and is not done again; on an I/O buffers it is thrown
    away, in any form of states, as where a disk fails."""
    pair = Pair("adamw", home)
    pair.do("backward", "step", "zero", "eval", "backward")
    calls = iter([False, True])
    failing(pair, lambda: next(calls, False))
    pair.step()
    if home == "cpu":
        for _ in range(2):
            with pytest.raises(RuntimeError, match="stopped half-way"):
                pair.ours.synchronize()
        return
    with pytest.raises(ArithmeticError, match="broken"):
        pair.ours.synchronize()
    pair.assert_equal()
    pair.assert_equal_states()


FAULTS: dict[str, tuple[type, str, BaseException]] = {
    "read": (DiskBlock, "read_into", OSError(errno.EIO, "Input/output error")),
    "write": (DiskBlock, "write", OSError(errno.ENOSPC, "No space left on device")),
    "allocate": (DiskTier, "allocate", OSError(errno.ENOSPC, "No space left on device")),
    "lane": (ThreadCopyLane, "submit", RuntimeError("can't start new thread")),
    "interrupt": (ThreadCopyLane, "submit", KeyboardInterrupt()),
}


@pytest.mark.parametrize(
    ("then", "max_norm"), [("repeat", 0.1), ("look and repeat", None), ("go on", None), ("accumulate", None)]
)
@pytest.mark.parametrize(
    ("fault", "home"), [*((name, "disk") for name in FAULTS), ("lane", "cpu"), ("interrupt", "cpu")]
)
def test_a_step_that_raised_is_applied_once_and_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, home: str, then: str, max_norm: float | None
) -> None:
    """Whichever of its transfers fails: a step runs at once where other code holds a parameter."""
    owner, method, error = FAULTS[fault]
    raised = 0
    for fatal in range(1, 200, 2):
        place = f"{tmp_path}/" if home == "disk" else "cpu"
        pair = Pair("momentum", place, kinds=("linear", "linear", "linear"), slices=3, max_norm=max_norm)
        held = pair.ours.param_groups[0]["params"][0].detach()
        pair.do("backward")
        faults = Faults(monkeypatch, owner, method, error)
        faults.fatal = fatal
        try:
            pair.step()
        except type(error):
            raised += 1
        else:
            break
        finally:
            monkeypatch.undo()
        del held
        assert pair.ours.steps == bool(pair.ours._raised)  # it counts as soon as it is sure to be applied
        if then == "look and repeat":
            pair.ours.synchronize()
        if "repeat" in then or not pending(pair.model):
            pair.ours.step()
            assert pair.ours.steps == 1
            pair.assert_equal()
            pair.assert_equal_states()
        pair.do(*(["zero"] if then != "accumulate" else []), "backward", "step")
        assert pair.ours.steps == 2
        pair.assert_equal()
        pair.assert_equal_states()
    assert raised > 0


class Stops(torch.optim.SGD):
    """Raises before or after its next step."""

    before = after = False

    def step(self, closure: Any = None) -> Any:
        cls = type(self)
        if cls.before:
            cls.before = False
            raise ArithmeticError("broken")
        super().step()
        if cls.after:
            cls.after = False
            raise ArithmeticError("broken")


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_that_raised_in_parameters_on_the_device_is_applied_once_or_refused_from_then_on(
    home: str, moment: str, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    bare = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, resident="1.*")
    optimizers = Stops(bare.parameters(), lr=0.1), OffloadOptimizer(model, Stops, lr=0.1, max_norm=max_norm)
    for run in (bare, model):
        run(torch.ones(2, 8)).pow(2).mean().backward()
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(bare.parameters(), max_norm)
    optimizers[0].step()
    monkeypatch.setattr(Stops, moment, True)
    with pytest.raises((ArithmeticError, RuntimeError), match="broken"):
        optimizers[1].step()
    if moment == "after":
        model.zero_grad()
        for action in (optimizers[1].step, lambda: model(torch.ones(2, 8)), optimizers[1].state_dict):
            with pytest.raises(RuntimeError, match=r"stopped half-way: broken. Make model and optimizer anew"):
                action()
        return
    optimizers[1].step()
    assert optimizers[1].steps == 1
    for found, expected in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
