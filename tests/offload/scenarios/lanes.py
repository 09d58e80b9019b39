"""Lanes of either kind: on a thread that does its work when it is waited for, and on streams that run late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.mesh.ranks import Transport
from offload.storage.transfer import CudaLink
from offload.streaming.lane import StreamCopyLane, ThreadCopyLane
from offload.telemetry.clock import LATEST, Clock
from pipe.threads import Future, Threads
from tests.late_cuda import DEVICE, LateCuda
from tests.waits import fails_with

CPU = torch.device("cpu")


class LateThread(Threads):
    """A thread whose jobs run when their future, or the thread, is waited for."""

    def __init__(self) -> None:
        self._futures: list[LateThread.LateFuture] = []

    def submit(self, work: Callable[[], Any]) -> LateThread.LateFuture:
        self._futures.append(self.LateFuture(work))
        return self._futures[-1]

    offer = submit

    @property
    def waiting(self) -> list[LateThread.LateFuture]:
        """What has not run yet."""
        return [future for future in self._futures if not future.done]

    def wait_idle(self) -> None:
        for future in self._futures:
            future.wait_idle()

    def close(self, *, wait: bool = False) -> None:
        """What was submitted still runs."""

    class LateFuture(Future[Any]):
        def withdraw(self) -> bool:
            return False

        def wait_idle(self) -> None:
            if not self.done:
                self.run()


def thread(device: torch.device) -> ThreadCopyLane:
    lane = ThreadCopyLane("late", device)
    lane._threads.close()
    lane._threads = LateThread()  # type: ignore[assignment]
    return lane


def _nothing() -> None:
    """An update that changes nothing."""


def _ones() -> Tensor:
    return torch.ones(4)


@fails_with("copied before its predecessor")
def a_copy_comes_after_what_it_was_given_after(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    log = list[str]()
    first = thread(CPU).submit("D0", lambda: log.append("D0"))
    thread(CPU).submit("U0", lambda: log.append("U0"), [first]).wait()
    assert log == ["D0", "U0"], "copied before its predecessor"
    cuda, home, slot = LateCuda(monkeypatch), torch.zeros(4), torch.zeros(4)
    update = StreamCopyLane(DEVICE).submit("U0", lambda: cuda.launch(lambda: home.fill_(7)))
    StreamCopyLane(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.copy_(home)), [update]).synchronize()
    assert (slot == 7).all(), "copied before its predecessor"


@fails_with("overwritten while it is read")
def a_slot_is_filled_after_its_readers(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Compute reads a slot, late; a copy into the slot was given later."""
    for make in (StreamCopyLane, thread):
        cuda, slot, read = LateCuda(monkeypatch), torch.zeros(4), torch.ones(4)
        cuda.launch(partial(read.copy_, slot))
        make(DEVICE).submit("L0", partial(cuda.launch, partial(slot.fill_, 7))).synchronize()
        cuda.synchronize()
        assert not read.any(), "overwritten while it is read"
        assert (slot == 7).all(), "the copy is missing"


@fails_with("read before the copy")
def bytes_are_there_when_a_thread_says_so(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, slot = LateCuda(monkeypatch), torch.zeros(4)
    thread(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.fill_(7))).wait()
    assert (slot == 7).all(), "read before the copy"


@fails_with("the allocator does not know its user")
def what_a_lane_of_ranks_frees_is_known_to_the_allocator(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, log = LateCuda(monkeypatch), list[object]()
    monkeypatch.setattr("offload.mesh.ranks.record_stream", lambda tensor, stream: log.append(stream))
    Transport(DEVICE, "").use(_ones())
    assert log == [cuda.compute], "the allocator does not know its user"


@fails_with("copied after the close")
def a_home_goes_after_the_last_copy_of_it(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """An unused load; then the model is freed, and its memory is reused."""
    cuda, home, slot = LateCuda(monkeypatch), torch.full((4,), 7.0), torch.zeros(4)
    lane = StreamCopyLane(DEVICE)
    lane.submit("L0", lambda: cuda.launch(lambda: slot.copy_(home)))
    lane.close()
    home.fill_(9)
    slot_then = slot.clone()
    lane._stream.synchronize()
    assert torch.equal(slot, slot_then), "copied after the close"


@fails_with("copied after its memory went")
def what_is_copied_after_the_close_is_there_when_its_memory_goes(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """An unused load of what an update still writes, when the model is closed."""
    cuda, slot = LateCuda(monkeypatch), torch.zeros(4)
    lane = StreamCopyLane(DEVICE)
    lane._threads = LateThread()  # type: ignore[assignment]
    lane.submit("L0", lambda: cuda.launch(lambda: slot.fill_(7)), [LateThread().submit(_nothing)])
    lane.close()
    lane._threads.wait_idle()  # the thread comes to it
    assert (slot == 7).all(), "copied after its memory went"


@fails_with("a copy is still to come")
def a_lane_is_at_rest_after_all_its_copies(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, slots = LateCuda(monkeypatch), [torch.zeros(4) for _ in range(3)]
    on_thread, on_stream = thread(CPU), StreamCopyLane(DEVICE)
    on_thread.submit("L0", lambda: slots[0].fill_(7))  # type: ignore[arg-type, return-value]
    on_stream.submit("L0", lambda: cuda.launch(lambda: slots[1].fill_(7)))
    deferred = StreamCopyLane(DEVICE)
    deferred._threads = LateThread()  # type: ignore[assignment]
    update = LateThread().submit(_nothing)
    deferred.submit("L0", lambda: cuda.launch(lambda: slots[2].fill_(7)), [update])
    for lane in (on_thread, on_stream, deferred):
        lane.wait_idle()
    assert all((slot == 7).all() for slot in slots), "a copy is still to come"


@fails_with("spans are missing", "both events must be recorded and completed", error=(AssertionError, RuntimeError))
def a_clock_counts_what_has_ended(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, clock = LateCuda(monkeypatch), Clock(DEVICE)
    for _ in range(3):
        with clock.span():
            cuda.launch(_ones)
    assert clock.seconds == pytest.approx(3e-3), "spans are missing"
    clock = Clock(DEVICE)
    with clock.span(4):
        cuda.launch(_ones)
    assert clock.seconds_each() == pytest.approx(1e-3 / 4), "spans are missing"


@fails_with("the host waited", "events are hoarded")
def a_clock_hoards_no_events_and_never_waits_in_a_step(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, clock = LateCuda(monkeypatch), Clock(DEVICE)
    for _ in range(2 * LATEST):
        with clock.span():
            cuda.launch(_ones)
    assert cuda.host_waits == 0, "the host waited"
    assert len(clock._spans) == 2 * LATEST, "none of these has ended"
    cuda.synchronize()
    with clock.span():
        cuda.launch(_ones)
    assert len(clock._spans) <= 1, "events are hoarded"


class OnDevice:
    """Memory of a device: copies into it are work of the current stream."""

    is_cuda = True
    device = DEVICE

    def __init__(self, cuda: LateCuda, values: Tensor) -> None:
        self.cuda = cuda
        self.values = values

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.launch(lambda: self.values.copy_(source))


@fails_with("a buffer was used again before its copy")
def a_fence_is_passed_after_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, buffer = LateCuda(monkeypatch), torch.full((4,), 7.0)
    slot = OnDevice(cuda, torch.zeros(4))
    copy = CudaLink(DEVICE).copier(slot)  # type: ignore[arg-type]
    assert copy is not None
    fence = copy(slot, buffer)  # type: ignore[arg-type]
    fence()
    buffer.fill_(9)  # the next piece
    cuda.synchronize()
    assert (slot.values == 7).all(), "a buffer was used again before its copy"
