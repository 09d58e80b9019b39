"""Lanes of either kind: on a thread that does its work when it is waited for, and on streams that run late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offload.lane import Clock, Lane, StreamLane, ThreadLane
from offload.tier.staging import CudaLink
from tests.late_cuda import DEVICE, LateCuda

CPU = torch.device("cpu")


class LateThread:
    """An executor whose jobs run when somebody waits for their result."""

    def submit(self, job: Callable[[], None]) -> LateThread.Result:
        return self.Result(job)

    class Result:
        def __init__(self, job: Callable[[], None]) -> None:
            self._job: Callable[[], None] | None = job

        def result(self) -> None:
            job, self._job = self._job, None
            if job is not None:
                job()

    def shutdown(self, wait: bool) -> None: ...


def thread(device: torch.device) -> ThreadLane:
    lane = ThreadLane("late", device)
    lane._thread.shutdown()
    lane._thread = LateThread()  # type: ignore[assignment]
    return lane


def _ones() -> Tensor:
    return torch.ones(4)


def a_copy_on_a_thread_is_done_after_its_wait(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    there = torch.zeros(4)
    thread(CPU).submit("L0", lambda: there.fill_(1)).wait()  # type: ignore[arg-type, return-value]
    assert there.all()


def a_copy_on_a_thread_comes_after_what_it_was_given_after(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    lane, log = thread(CPU), list[str]()
    first = thread(CPU).submit("D0", lambda: log.append("D0"))
    lane.submit("U0", lambda: log.append("U0"), [first]).wait()
    assert log == ["D0", "U0"]


def _overwrites(make: Callable[[torch.device], Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute reads a slot, late; a copy into the slot was given later."""
    cuda, slot, read = LateCuda(monkeypatch), torch.zeros(4), torch.ones(4)
    cuda.launch(lambda: read.copy_(slot))
    make(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.fill_(7))).finish()
    cuda.finish()
    assert not read.any()
    assert (slot == 7).all()


def a_stream_fills_a_slot_after_its_readers(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    _overwrites(StreamLane, monkeypatch)


def a_thread_fills_a_slot_after_its_readers(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    _overwrites(thread, monkeypatch)


def bytes_are_there_when_a_thread_says_so(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, slot = LateCuda(monkeypatch), torch.zeros(4)
    thread(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.fill_(7))).wait()
    assert (slot == 7).all()


def a_copy_on_a_stream_comes_after_what_it_was_given_after(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, home, slot = LateCuda(monkeypatch), torch.zeros(4), torch.zeros(4)
    update = StreamLane(DEVICE).submit("U0", lambda: cuda.launch(lambda: home.fill_(7)))
    StreamLane(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.copy_(home)), [update]).finish()
    assert (slot == 7).all()


def compute_reads_a_slot_after_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, slot, read = LateCuda(monkeypatch), torch.zeros(4), torch.zeros(4)
    arrival = StreamLane(DEVICE).submit("L0", lambda: cuda.launch(lambda: slot.fill_(7)))
    arrival.wait()
    cuda.launch(lambda: read.copy_(slot))
    assert cuda.host_waits == 0, "the host waited"
    cuda.finish()
    assert (read == 7).all()


def the_host_reads_a_home_after_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, home = LateCuda(monkeypatch), torch.zeros(4)
    StreamLane(DEVICE).submit("D0", lambda: cuda.launch(lambda: home.fill_(7))).finish()
    assert (home == 7).all()


def a_home_goes_after_the_last_copy_of_it(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A load that nobody used; then the model goes, and its memory is somebody else's."""
    cuda, home, slot = LateCuda(monkeypatch), torch.full((4,), 7.0), torch.zeros(4)
    lane = StreamLane(DEVICE)
    lane.submit("L0", lambda: cuda.launch(lambda: slot.copy_(home)))
    lane.close()
    home.fill_(9)
    slot_then = slot.clone()
    lane._stream.synchronize()
    assert torch.equal(slot, slot_then)


def a_clock_counts_what_has_ended(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, clock = LateCuda(monkeypatch), Clock(DEVICE)
    for _ in range(3):
        with clock.span():
            cuda.launch(_ones)
    assert clock.seconds == pytest.approx(3e-3)


def a_forecast_counts_what_has_ended(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, clock = LateCuda(monkeypatch), Clock(DEVICE)
    with clock.span(4):
        cuda.launch(_ones)
    assert clock.seconds_each() == pytest.approx(1e-3 / 4)


def a_clock_hoards_no_events_and_never_waits_in_a_step(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, clock = LateCuda(monkeypatch), Clock(DEVICE)
    for _ in range(4200):
        with clock.span():
            cuda.launch(_ones)
    assert cuda.host_waits == 0
    assert len(clock._spans) == 4200, "none of these has ended"
    cuda.finish()
    with clock.span():
        cuda.launch(_ones)
    assert len(clock._spans) <= 1


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


def a_fence_is_passed_after_its_copy(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, buffer = LateCuda(monkeypatch), torch.full((4,), 7.0)
    slot = OnDevice(cuda, torch.zeros(4))
    fence = CudaLink().copy(slot, buffer)  # type: ignore[arg-type]
    fence()
    buffer.fill_(9)  # the next piece
    cuda.finish()
    assert (slot.values == 7).all()
