"""I/O threads: work is done once, by a thread or by its waiter, and no wait is endless."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from offload.storage.io_threads import Future, IOThreads


def test_work_is_done_in_the_order_of_submission() -> None:
    threads, log = IOThreads(1, "test"), list[int]()
    futures = [threads.submit(lambda k=k: log.append(k)) for k in range(50)]  # type: ignore[misc]
    futures[-1].result()
    assert log == list(range(50))
    assert all(future.done() and future.returned for future in futures)


def test_an_error_is_raised_by_every_wait() -> None:
    def fail() -> None:
        raise OSError("gone")

    future = IOThreads(1, "test").submit(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            future.result()
    future.wait_idle()
    assert not future.returned


def test_work_is_taken_back_or_done_but_never_both() -> None:
    log: list[str] = []
    early, late, missed = (Future(lambda: log.append("work")) for _ in range(3))
    assert early.cancel()
    assert early.cancel()
    early.run()
    assert early.missed
    late.run()
    assert not late.cancel()
    assert not late.missed
    missed._begun = True  # a thread has come, and not yet looked
    assert not missed.cancel()
    missed.run()
    assert missed.missed
    assert log == ["work"]


def test_an_excess_thread_gets_no_work() -> None:
    """An interrupt between the start of a thread and its note leads to a second start."""
    threads, names = IOThreads(1, "test"), list[str]()
    go_on = threading.Event()
    threads.submit(lambda: (go_on.wait(60), names.append(threading.current_thread().name))[1])
    (first,) = threads._started
    threads._started.clear()
    threads.submit(lambda: names.append(threading.current_thread().name))
    (second,) = threads._started
    second.join(60)
    assert not second.is_alive()
    go_on.set()
    threads.wait_idle()
    assert names == ["test", "test"]
    threads.close()
    first.join(60)
    assert not first.is_alive()


def test_an_interrupted_waiter_does_not_keep_another_waiting() -> None:
    future = Future(lambda: None)
    waiting, ended = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        future.result()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    waiting.wait(60)
    future._gate.release()
    assert future._gate.acquire(timeout=60)  # as one that was interrupted before it could release it
    future._finished = True
    assert ended.wait(60)


def test_the_interpreter_ends_after_queued_work_and_does_not_wait_for_threads() -> None:
    code = (
        "from offload.storage.io_threads import IOThreads\n"
        "threads = IOThreads(1, 'test')\n"
        "for k in range(3): threads.submit(lambda k=k: print(k, flush=True))\n"
        "threads._started.clear()  # an interrupt in the middle of a start: an unregistered thread\n"
        "threads.submit(lambda: print('last', flush=True)).result()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["0", "1", "2", "last"], "")


def test_closed_threads_take_no_more_work() -> None:
    threads = IOThreads(1, "test")
    threads.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        threads.submit(lambda: None)
