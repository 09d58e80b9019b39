"""Threads: work is done once, by a thread or by its waiter, and no wait is endless."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from pipe.threads import Future, Threads
from tests.programs import run_program


def test_work_is_taken_back_or_done_but_never_both() -> None:
    log: list[str] = []
    early, late, missed = (Future(lambda name=name: log.append(name)) for name in ("early", "late", "missed"))
    assert early.withdraw()
    assert early.withdraw()
    early.run()
    late.run()
    assert not late.withdraw()
    missed._begun = True  # a thread has come, and not yet looked
    assert not missed.withdraw()
    missed.run()
    assert log == ["late"]
    early.run_or_wait()
    missed.run_or_wait()
    assert log == ["late", "early", "missed"]


def test_an_interrupted_waiter_does_not_keep_another_waiting() -> None:
    future = Future(lambda: None)
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        future.wait_idle()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    waiting.wait(60)
    future._gate.release()
    assert future._gate.acquire(timeout=60)  # as one that was interrupted before it could release it
    future.done = True
    assert ended.wait(60)


def test_the_interpreter_ends_after_queued_work_and_does_not_wait_for_threads() -> None:
    code = (
        "from pipe.threads import Threads\n"
        "threads = Threads(1, 'test')\n"
        "for k in range(3): threads.submit(lambda k=k: print(k, flush=True))\n"
        "threads._started.clear()  # an interrupt in the middle of a start: an unregistered thread\n"
        "threads.submit(lambda: print('last', flush=True)).wait()\n"
    )
    assert run_program(code) == (0, "0\n1\n2\nlast\n", "")


def test_closed_threads_take_no_more_work() -> None:
    threads = Threads(1, "test")
    threads.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        threads.submit(lambda: None)


@pytest.mark.parametrize("end", ["close", "fork", "busy"])
def test_where_no_thread_takes_work_its_waiter_runs_it(end: str) -> None:
    threads, log, go_on = Threads(1, "test"), list[int](), threading.Event()
    if end == "close":
        threads.close()
    elif end == "fork":
        threads._made_in = -1  # as in a forked child
    else:
        threads.submit(lambda: go_on.wait(60))
    future = threads.offer(lambda: log.append(threading.get_ident()))
    future.run_or_wait()
    future.run_or_wait()
    assert log == [threading.get_ident()]
    go_on.set()


def test_cancelled_work_never_runs() -> None:
    threads, log, gate = Threads(1, "test"), list[str](), threading.Event()
    running = threads.submit(lambda: (gate.wait(60), log.append("running"))[1])
    queued = threads.offer(lambda: log.append("queued"))
    queued.cancel()
    gate.set()
    running.cancel()
    threads.wait_idle()
    assert log in (["running"], [])


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 1), ({"operation_threads": 2}, 2), ({"operation_threads": None}, 3)]
)
def test_operations_of_a_thread_leave_the_threads_of_a_team_to_others(given: dict[str, Any], expected: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = Threads(1, "limited", **given)
        assert threads.submit(torch.get_num_threads).wait() == expected
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
