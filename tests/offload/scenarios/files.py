"""Files, buffers and the threads that move between them: work that a thread has begun ends when it is waited for."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.optim.io_buffers import IOBufferPool, Read, Write
from offload.storage import DiskTier
from offload.storage.buffer import host_buffer
from offload.storage.disk import DiskBlock
from offload.storage.transfer import Link, Staging
from pipe.threads import Future, Threads
from tests.offload.late import LateLane, run_late
from tests.offload.pair import Pair
from tests.offload.scenarios.lanes import LateThread
from tests.offload.storage.test_staging import LateLink
from tests.offload.test_faults import Faults
from tests.waits import fails_with

CPU = torch.device("cpu")
PIECE = 1 << 14


def late_threads(monkeypatch: pytest.MonkeyPatch) -> list[LateThread]:
    made: list[LateThread] = []

    def threads(*_: object, **__: object) -> LateThread:
        made.append(LateThread())
        return made[-1]

    for user in ("optim.io_buffers", "optim.optimizer"):
        monkeypatch.setattr(f"offload.{user}.Threads", threads)
    return made


def _disk(monkeypatch: pytest.MonkeyPatch, path: Path, link: Link) -> tuple[DiskTier, Any, Tensor]:
    """A file of some pieces, full of sevens, and what is to be read into."""
    for way in ("UNSTAGED_BYTES", "STAGED_BYTES"):
        monkeypatch.setattr(f"offload.storage.transfer.{way}", PIECE)
    tier = DiskTier(path, CPU, direct=False, link=link)
    block: Any = tier.allocate(6 * PIECE, "weights")
    block.keeps = tier  # whose files go with it
    block.tensor.fill_(7)
    return tier, block, host_buffer(6 * PIECE)


@contextlib.contextmanager
def _helped(monkeypatch: pytest.MonkeyPatch, name: str, *, error: OSError | None = None) -> Iterator[list[int]]:
    """Threads that end their first call of the system when they are waited for, and how many are in such a call.

    The caller's calls wait until a thread is in one; they raise the ``error``.
    """
    call, caller = getattr(os, name), threading.current_thread()
    begun, waited, active = threading.Event(), threading.Event(), list[int]()

    def late(*arguments: Any) -> Any:
        if threading.current_thread() is caller:
            assert begun.wait(60)
            if error is not None:
                raise error
            return call(*arguments)
        active.append(1)
        begun.set()
        waited.wait(60)
        try:
            return call(*arguments)
        finally:
            active.pop()

    def and_waited(method: Any) -> Any:
        def waits(self: Future[Any]) -> Any:
            waited.set()
            return method(self)

        return waits

    with monkeypatch.context() as patch:
        patch.setattr(os, name, late)
        for method in ("run_or_wait", "cancel"):
            patch.setattr(Future, method, and_waited(getattr(Future, method)))
        try:
            yield active
        finally:
            waited.set()


@fails_with("a read returned before its bytes")
def a_read_is_done_when_it_returns(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    link = LateLink()
    _, block, slot = _disk(monkeypatch, path, link=link)
    with _helped(monkeypatch, "preadv") as active:
        block.read_into(slot)
        assert not active, "a read returned before its bytes"
    link.synchronize()
    assert (slot == 7).all()


@fails_with("written before the copy from the device")
def a_write_comes_after_the_copy_from_the_device(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    _, block, _ = _disk(monkeypatch, path, link=LateLink())
    block.write(torch.full((block.nbytes,), 9, dtype=torch.uint8), 0)
    assert (block.tensor == 9).all(), "written before the copy from the device"


@fails_with("a transfer goes on after its failure")
def a_transfer_that_failed_goes_on_nowhere(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    _, block, _ = _disk(monkeypatch, path, link=LateLink())
    with _helped(monkeypatch, "pwritev", error=OSError(5, "once")) as active:
        with pytest.raises(OSError, match="once"):
            block.write(torch.full((block.nbytes,), 9, dtype=torch.uint8), 0)
        assert not active, "a transfer goes on after its failure"


# --- buffers that lanes share ---------------------------------------------------------------------------------------


@fails_with("overwritten before it was copied")
def a_buffer_is_used_again_after_the_copy_out_of_it(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    link = LateLink()
    staging = Staging(link, 1, 16)
    device = torch.zeros(16, dtype=torch.uint8)
    for piece in (1, 2):
        buffer = staging.acquire_buffer()
        buffer.fill_(piece)
        assert piece == 1 or (device == 1).all(), "overwritten before it was copied"
        staging.release(buffer, link.copy(device, buffer))


# --- what several threads look at -----------------------------------------------------------------------------------


class Condition:
    """A lock, or a condition. A thread that waits for it is helped by ``helper``, once, and then waits for ever."""

    def __init__(self) -> None:
        self.held = False
        self.notified = 0
        self.helper: Callable[[], None] | None = None

    def __enter__(self) -> None:
        assert not self.held, "a thread would wait for itself"
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False

    def wait(self) -> None:
        assert self.held, "waited for without the lock"
        helper, self.helper = self.helper, None
        assert helper is not None, "it would wait for ever"
        self.held = False
        helper()
        self.held = True

    def notify(self) -> None:
        assert self.held, "notified without the lock"
        self.notified += 1


class Guarded(deque[Any]):
    """Is looked at only by who holds ``condition``, and not for ever."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition
        self.looks = 0

    def _looked(self, name: str, *args: Any) -> Any:
        assert self.condition.held, "the queue was read without its lock"
        self.looks += 1
        assert self.looks < 100, "the queue was polled instead of waited for"
        return getattr(deque, name)(self, *args)


for name in ("__len__", "__iter__", "popleft", "append", "appendleft", "clear"):
    setattr(Guarded, name, partialmethod(Guarded._looked, name))


# --- the I/O buffers of an optimizer -------------------------------------------------------------------------------


@contextlib.contextmanager
def _buffer_pool(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> Iterator[tuple[list[LateThread], IOBufferPool, Any, Any]]:
    """An I/O buffers, and two files: of fives and of sixes."""
    threads = late_threads(monkeypatch)
    tier = DiskTier(path, CPU, direct=False)
    fives, sixes = (tier.allocate(PIECE, f"block{k}") for k in (5, 6))
    fives.tensor.fill_(5)
    sixes.tensor.fill_(6)
    yield threads, IOBufferPool(), fives, sixes
    tier.close()


@fails_with("an I/O buffer was handed out before its bytes")
def an_io_buffer_holds_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with _buffer_pool(monkeypatch, path) as (_, buffer_pool, fives, _):
        io_buffer = buffer_pool.prepare("update_block", lambda: ([Read("moment", fives, 0, PIECE)], 0))
        assert (io_buffer.part("moment").source == 5).all(), "an I/O buffer was handed out before its bytes"


@fails_with("a discarded prefetch landed")
def a_discarded_prefetch_never_lands(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with _buffer_pool(monkeypatch, path) as (threads, buffer_pool, fives, sixes):
        buffer_pool.prefetch([("unused", lambda: ([Read("moment", fives, 0, PIECE)], 0))])
        io_buffer = buffer_pool.prepare("update_block", lambda: ([Read("moment", sixes, 0, PIECE)], 0))
        for io_threads in threads:
            io_threads.wait_idle()
        assert (io_buffer.part("moment").source == 6).all(), "a discarded prefetch landed"


@fails_with(
    "DID NOT RAISE .*OSError", "a write goes on after its failure", error=(pytest.fail.Exception, AssertionError)
)
def what_fails_to_be_written_goes_on_nowhere(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with _buffer_pool(monkeypatch, path) as (threads, buffer_pool, fives, sixes):

        def fails(source: Tensor, offset: int) -> None:
            raise OSError("full")

        monkeypatch.setattr(fives, "write", fails)
        source = torch.full((PIECE,), 9, dtype=torch.uint8)
        writes = [Write(source, fives, 0), Write(source, sixes, 0)]
        buffer_pool.prepare("update_block", lambda: ([], 0))
        buffer_pool.write_back(writes)
        with pytest.raises(OSError, match="full"):
            buffer_pool.wait_idle()
        assert not any(io_threads.waiting for io_threads in threads), "a write goes on after its failure"
        source.fill_(11)
        assert [write.written for write in writes] == [False, True]
        assert (writes[0].source == 9).all()


# --- updates whose writes are on their way --------------------------------------------------------------------------


@contextlib.contextmanager
def _pending(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[tuple[list[LateThread], Pair]]:
    """A step of AdamW to be done, in several blocks, by threads that end when they are waited for."""
    with monkeypatch.context() as patch:
        patch.setattr("offload.optim.update_blocks.MAX_BLOCK_BYTES", 16)
        threads = late_threads(patch)
        # One shard: the update of another would wait for what this one left.
        pair = Pair("adamw", f"{path}/", max_norm=0.1, slices=1)
        pair.do("backward", "step", "zero", "eval", "backward", "step", "zero")
        yield threads, pair


@fails_with(
    "an update is done before its writes",
    "written twice or not at all",
    "outlives their use",  # a write that goes on has the slot
    error=(AssertionError, RuntimeWarning),
)
def an_update_has_arrived_when_it_is_done(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """And nothing of it was written twice: a weight and two moments of four bytes each."""
    with _pending(monkeypatch, path) as (threads, pair):
        updated = sum(task.nbytes for shard in pair.model._homes.shards for task in shard.pending.tasks)
        before = pair.model.statistics().update_bytes_written
        pair.ours.synchronize()
        assert not any(io_threads.waiting for io_threads in threads), "an update is done before its writes"
        written = pair.model.statistics().update_bytes_written - before
        assert written == 3 * updated, "written twice or not at all"
        pair.assert_equal()
        pair.assert_equal_states()


@fails_with("transfers go on after a failure", "bytes are left unwritten")
def an_update_that_failed_goes_on_nowhere(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Neither what was sent before, nor the weights that were being read; and what is left is written by the next."""
    for fatal in range(0, 12, 2):
        _fails_once(monkeypatch, path, DiskBlock, "write", OSError("full"), fatal)
        _fails_once(monkeypatch, path, DiskBlock, "read_into", OSError("broken"), fatal)
    _fails_once(monkeypatch, path, IOBufferPool, "prefetch", MemoryError(), 0)


def _fails_once(
    monkeypatch: pytest.MonkeyPatch, path: Path, owner: type, name: str, error: Exception, fatal: int
) -> None:
    with _pending(monkeypatch, path) as (_, pair):
        with monkeypatch.context() as patch:
            Faults(patch, owner, name, error).fatal = fatal + 1
            with pytest.raises(type(error)):
                pair.eval()
            assert not pair.ours.buffer_pool._writing, "transfers go on after a failure"
            assert not pair.ours._filler.waiting, "transfers go on after a failure"  # type: ignore[attr-defined]
        update: Any = pair.model._homes.shards[0].pending
        update.flush()
        assert not any(task.unwritten for task in update.tasks), "bytes are left unwritten"
        pair.eval()
        pair.assert_equal()
        pair.assert_equal_states()


class UnstartedThreads(Threads):
    """Threads that never start, so that only the waiter of a job runs it."""

    def offer(self, work: Callable[[], Any]) -> Future[Any]:
        return Future(work)


@fails_with("Tensor-likes are not")
def weights_are_there_when_they_are_updated(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    run_late(monkeypatch, 0)
    monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: LateLane(0))
    monkeypatch.setattr("offload.optim.optimizer.Threads", UnstartedThreads)
    pair = Pair("adamw", f"{path}/", max_norm=0.1)
    pair.do("backward", "step", "zero", "eval")
