"""Models with blocks: late copies and updates, and forwards that are suspended when one of them fails."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadOptimizer
from offload.engine.suspend import SuspendedForward
from tests.offload.blocks.towers import Model, loss_of, make, words, wrap
from tests.offload.scenarios.lanes import LateThread
from tests.waits import fails_with


def after_a_step(path: Path, optimizer_thread: LateThread | None = None) -> tuple[Any, Any, Any]:
    """A bare model that has been trained for a step, ours with its gradients, and the optimizer of ours."""
    bare = make(2, dropout=0.0)
    model = wrap(bare, path)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    if optimizer_thread is not None:
        optimizer._thread_at_once = optimizer_thread
    for each in (bare, model):
        loss_of(each(words())).backward()
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    return bare, model, optimizer


def assert_same_values(expected: Any, values: dict[str, Tensor]) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(values[name], value)


@fails_with("Tensor-likes are not")
def parameters_outside_of_blocks_are_updated_by_the_step(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    bare, model, optimizer = after_a_step(path, LateThread())
    optimizer.step()
    assert_same_values(bare, dict(model.state_dict()))


class _Interrupted(LateThread):
    """The first wait for a job is interrupted."""

    class LateFuture(LateThread.LateFuture):
        def wait(self) -> Any:
            waits.append(self)
            if len(waits) == 1:
                raise KeyboardInterrupt
            return super().wait()


#: The waits for a job of :class:`_Interrupted`.
waits: list[Any] = []


@fails_with("a part of the step came later")
def a_step_that_is_interrupted_while_a_thread_updates_is_whole(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    waits.clear()
    thread = _Interrupted()
    bare, model, optimizer = after_a_step(path, thread)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    now = {name: value.clone() for name, value in model.state_dict().items()}
    thread.wait_idle()
    expected = before if all(torch.equal(now[name], before[name]) for name in now) else dict(bare.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected[name]), f"a part of the step came later: {name}"


class _Stopped(Exception):
    pass


class Failing(Model):
    """Fails behind its blocks, in the first chunk; the other one is suspended then, and its end waits for an event."""

    may_end = threading.Event()
    ended = 0

    def forward(self, words: Tensor, **more: Any) -> Any:  # type: ignore[override]
        try:
            super().forward(words, **more)
        except BaseException:
            Failing.may_end.wait()
            Failing.ended += 1
            raise
        raise _Stopped


JOIN = threading.Thread.join


@fails_with("a forward was still running when the call returned")
def suspended_forwards_have_ended_when_the_call_returns(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Of two chunks one fails while the other is suspended. That ends as late as it may: when it is waited for."""
    made: list[SuspendedForward] = []
    start = SuspendedForward.start

    def noted(self: SuspendedForward) -> Any:
        made.append(self)
        return start(self)

    def released(self: threading.Thread, timeout: float | None = None) -> None:
        Failing.may_end.set()
        JOIN(self, timeout)

    Failing.may_end.clear()
    Failing.ended = 0
    monkeypatch.setattr(SuspendedForward, "start", noted)
    monkeypatch.setattr(threading.Thread, "join", released)
    try:
        with pytest.raises(_Stopped):
            wrap(Failing(2), path, num_microbatches=2)(words(2))
        assert Failing.ended == 1, "a forward was still running when the call returned"
    finally:  # forwards that a mutation has left
        Failing.may_end.set()
        for each in made:
            each._answers.put((False, None))
            JOIN(each._thread)
