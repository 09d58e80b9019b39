"""Workers run tasks in order, under the caller's settings, and tell everything that happens."""

import contextlib
import contextvars
import gc
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from pipe.checkpoint import enable_recomputing, is_recomputing
from pipe.microbatch import Batch
from pipe.stream import CPUStream
from pipe.worker import Task, needs_threads, spawn_workers, task_runner, worker

CPU, META = torch.device("cpu"), torch.device("meta")


def task(function: Any, **keywords: Any) -> Any:
    return Task(CPUStream, compute=function, finalize=None, **keywords)


def test_one_device_has_one_worker_and_tasks_keep_their_order() -> None:
    ran = []
    with spawn_workers([CPU, CPU, META]) as (in_queues, out_queues):
        assert in_queues[0] is in_queues[1]
        assert in_queues[0] is not in_queues[2]
        for k in range(10):
            in_queues[k % 2].put(task(lambda k=k: ran.append(k) or Batch(k)))
        results = [out_queues[0].get() for _ in range(10)]
    assert ran == list(range(10))
    assert [(ok, payload[1].value) for ok, payload in results] == [(True, k) for k in range(10)]


def test_workers_of_different_devices_run_at_the_same_time() -> None:
    barrier, met = threading.Barrier(2, timeout=60), []

    def meet() -> Any:
        met.append(barrier.wait())
        return Batch(0)

    with task_runner([CPU, META]) as run:
        run([(0, task(meet)), (1, task(meet))])
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_defect_pipe_8_any_exception_is_handed_over_and_the_worker_lives_on(error: Any) -> None:
    def fail() -> None:
        raise error

    with spawn_workers([CPU]) as (in_queues, out_queues):
        in_queues[0].put(task(fail))
        ok, payload = out_queues[0].get()
        assert (ok, payload) == (False, error)
        in_queues[0].put(task(lambda: Batch(1)))
        assert out_queues[0].get()[0]


def test_the_first_failing_task_is_raised_after_all_have_ended() -> None:
    ended = []

    def fail(message: Any) -> None:
        ended.append(message)
        raise ValueError(message)

    with pytest.raises(ValueError, match="first"), task_runner([META, CPU]) as run:
        run([(0, task(lambda: fail("first"))), (1, task(lambda: fail("second")))])
    assert sorted(ended) == ["first", "second"]


def test_all_threads_have_ended_when_the_context_ends() -> None:
    before = set(threading.enumerate())
    with contextlib.suppress(RuntimeError), spawn_workers([CPU, META]) as (in_queues, _):
        in_queues[0].put(task(lambda: Batch(1)))
        raise RuntimeError
    assert set(threading.enumerate()) <= before


def test_settings_phase_and_context_of_the_caller_hold_in_the_worker() -> None:
    variable = contextvars.ContextVar("variable", default="nobody")
    variable.set("caller")
    reads = {}

    def read() -> Any:
        reads.update(
            grad=torch.is_grad_enabled(),
            autocast=torch.is_autocast_enabled("cpu"),
            device=torch.empty(1).device.type,
            recomputing=is_recomputing(),
            variable=variable.get(),
            thread=threading.current_thread() is threading.main_thread(),
        )
        return Batch(None)

    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"), enable_recomputing():
        with task_runner([CPU, META]) as run:
            run([(0, task(read))])
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
        (output,) = run([(1, task(lambda: Batch(threading.current_thread())))])
    assert output.value is threading.current_thread()


def test_inline_tasks_run_in_the_calling_thread_before_later_ones_of_their_device() -> None:
    ran = []

    def note(name: Any) -> Any:
        ran.append((name, threading.current_thread() is threading.main_thread()))
        return Batch(name)

    with task_runner([CPU, META, CPU]) as run:
        outputs = run(
            [(0, task(lambda: note("a"), inline=True)), (1, task(lambda: note("b"))), (2, task(lambda: note("c")))]
        )
    assert [output.value for output in outputs] == ["a", "b", "c"]
    assert sorted(ran) == [("a", True), ("b", False), ("c", False)]
    assert ran.index(("a", True)) < ran.index(("c", False))


def test_a_worker_keeps_no_task_alive_while_it_waits() -> None:
    class Payload:
        pass

    class InQueue:
        """Gives one task out; when asked for the next, notes whether the first is still alive."""

        def __init__(self) -> None:
            payload = Payload()
            self.alive = weakref.ref(payload)
            self.tasks = [task(lambda: Batch(payload) and Batch(None))]

        def get(self) -> Any:
            if self.tasks:
                return self.tasks.pop()
            out_queue.get()  # a result refers to its task
            gc.collect()
            self.alive_while_waiting = self.alive() is not None
            return None

    in_queue, out_queue = InQueue(), SimpleQueue()
    worker(in_queue, out_queue, CPU)
    assert not in_queue.alive_while_waiting


def test_finalize_runs_with_what_compute_returned() -> None:
    seen = []
    both = Task(CPUStream, compute=lambda: Batch(3), finalize=seen.append)
    batch = both.compute()
    both.finalize(batch)
    assert seen == [batch]
    task(lambda: Batch(3)).finalize(batch)
