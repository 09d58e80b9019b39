"""Tasks of one device run in order, under the caller's settings, and everything that happens in them is told."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipe.checkpoint import enable_recomputing, is_recomputing
from pipe.stream import CPUStream
from pipe.worker import Task, needs_threads, task_runner

CPU, META = torch.device("cpu"), torch.device("meta")


def task(stage: int, function: Callable[[], Any], *, inline: bool = False) -> Task:
    return Task(stage, function, CPUStream, inline)


def test_tasks_of_one_device_run_in_one_thread_and_keep_their_order() -> None:
    ran: list[tuple[int, threading.Thread]] = []
    with task_runner([CPU, CPU, META]) as run:
        found = run([task(k % 2, lambda k=k: ran.append((k, threading.current_thread())) or k) for k in range(10)])  # type: ignore[misc]
        (other,) = run([task(2, threading.current_thread)])
    assert found == [k for k, _ in ran] == list(range(10))
    assert {thread for _, thread in ran}.isdisjoint({other, threading.main_thread()})
    assert len({thread for _, thread in ran}) == 1


def test_tasks_of_different_devices_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=60)
    with task_runner([CPU, META]) as run:
        assert sorted(run([task(0, barrier.wait), task(1, barrier.wait)])) == [0, 1]


@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_defect_pipe_8_any_exception_is_handed_over_and_the_thread_lives_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with task_runner([CPU, META]) as run:
        with pytest.raises(type(error)) as raised:
            run([task(0, fail)])
        assert raised.value is error
        assert run([task(0, lambda: 1)]) == [1]


def test_the_first_failing_task_is_raised_after_all_have_ended() -> None:
    ended = []

    def fail(message: str) -> None:
        ended.append(message)
        raise ValueError(message)

    with task_runner([META, CPU]) as run:
        with pytest.raises(ValueError, match="first"):
            run([task(0, lambda: fail("first")), task(1, lambda: fail("second"))])
        assert sorted(ended) == ["first", "second"]


def test_all_threads_have_ended_when_the_context_ends() -> None:
    before = set(threading.enumerate())
    with contextlib.suppress(RuntimeError), task_runner([CPU, META]) as run:
        run([task(0, lambda: None), task(1, lambda: None)])
        raise RuntimeError
    assert set(threading.enumerate()) <= before


def test_settings_phase_and_context_of_the_caller_hold_in_the_thread() -> None:
    variable = contextvars.ContextVar("variable", default="nobody")
    variable.set("caller")

    def read() -> dict[str, Any]:
        return {
            "grad": torch.is_grad_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "device": torch.empty(1).device.type,
            "recomputing": is_recomputing(),
            "variable": variable.get(),
            "thread": threading.current_thread() is threading.main_thread(),
        }

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), enable_recomputing():
        with task_runner([CPU, META]) as run:
            (reads,) = run([task(0, read)])
    assert reads == {
        "grad": False,
        "autocast": True,
        "device": "meta",
        "recomputing": True,
        "variable": "caller",
        "thread": False,
    }


def test_tasks_of_a_single_device_run_in_the_calling_thread() -> None:
    assert not needs_threads([CPU, torch.device("cpu", 1)])
    assert needs_threads([CPU, META])
    with task_runner([CPU, CPU]) as run:
        assert run([task(1, threading.current_thread)]) == [threading.current_thread()]


def test_beside_an_inline_task_all_of_its_device_run_in_the_calling_thread() -> None:
    def here() -> bool:
        return threading.current_thread() is threading.main_thread()

    with task_runner([CPU, META, CPU]) as run:
        assert run([task(0, here, inline=True), task(1, here), task(2, here)]) == [True, False, True]


def test_a_thread_keeps_no_task_alive_while_it_waits() -> None:
    class Payload:
        pass

    def run_one(run: Callable[..., Any]) -> weakref.ref[Payload]:
        payload = Payload()
        run([task(0, lambda: payload and None)])
        return weakref.ref(payload)

    with task_runner([CPU, META]) as run:
        alive = run_one(run)
        run([task(0, lambda: None)])
        gc.collect()
        assert alive() is None
