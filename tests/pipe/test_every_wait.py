"""Mutation tests of pipe: without any one wait or event of streams, copies, workers and lanes, late work is noticed.

The waits between the stages of a train pipeline have a table of their own (``train/test_waits.py``).
"""

import contextlib
import inspect
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch.amp.grad_scaler import _MultiDeviceReplicator

from pipe import stream, threads
from pipe.copy import Copy, Wait
from pipe.stream import CPUStream, wait_stream
from pipe.threads import Future, Threads
from pipe.torch_private import amp
from pipe.train.lane import InlineLane, Ticket
from tests.late_cuda import LateCuda, LateEvent, LateStream
from tests.pipe.test_copy import Timeline
from tests.pipe.test_pipe import Pop, Stash
from tests.waits import fails_with, find_sites, is_value_used, take_out

# --- streams --------------------------------------------------------------------------------------------------------


@fails_with("read before it was written")
def a_stream_and_the_cpu_read_what_another_stream_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, a, b = LateCuda(monkeypatch), LateStream(), LateStream()
    boundary, read = torch.zeros(3), torch.zeros(3)
    with cuda.on(a):
        cuda.launch(lambda: boundary.fill_(7))
    wait_stream(b, a)
    with cuda.on(b):
        cuda.launch(lambda: read.copy_(boundary))
    b.synchronize()
    with cuda.on(a):
        cuda.launch(lambda: boundary.fill_(9))
    wait_stream(CPUStream, a)
    assert (*read.tolist(), *boundary.tolist()) == (7,) * 3 + (9,) * 3, "read before it was written"


@fails_with("the allocator does not know the user")
def the_allocator_is_told_of_the_whole_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(torch.Tensor):
        is_cuda = True

    storage, user = mock.Mock(), LateStream()
    storage.set_.return_value = storage
    monkeypatch.setattr(torch, "empty", lambda *_, **__: storage)
    stream.record_stream(torch.zeros(3).as_subclass(OnDevice), user)
    assert storage.record_stream.mock_calls == [mock.call(user)], "the allocator does not know the user"


# --- copies ---------------------------------------------------------------------------------------------------------


@fails_with("read before it was written")
def waits_order_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, a, b = LateCuda(monkeypatch), LateStream(), LateStream()
    values = {name: torch.zeros(1) for name in ("output", "input", "gradient", "gradient read")}
    x = torch.zeros(1, requires_grad=True)
    with cuda.on(a):
        cuda.launch(lambda: values["output"].fill_(7))
    (y,) = Wait.apply(a, b, x)
    with cuda.on(b):
        cuda.launch(lambda: values["input"].copy_(values["output"]))
        b.synchronize()
        cuda.launch(lambda: values["gradient"].fill_(9))
    y.backward()
    with cuda.on(a):
        cuda.launch(lambda: values["gradient read"].copy_(values["gradient"]))
    a.synchronize()
    assert values["input"] == 7, "an input was read before it was written"
    assert values["gradient read"] == 9, "a gradient was read before it was written"


@fails_with("the allocator does not know the users")
def a_copy_uses_both_copy_streams_and_tells_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    monkeypatch.setattr("pipe.copy.use_stream", lambda s: contextlib.nullcontext(log.append(f"use {s}")))
    monkeypatch.setattr("pipe.copy.get_device", lambda s: torch.device("cpu"))
    monkeypatch.setattr("pipe.copy.record_stream", lambda t, s: log.append(f"{t.tolist()} read on {s}"))
    monkeypatch.setattr("pipe.copy.current_stream", lambda device: "compute")
    (y,) = Copy.apply("a", "b", torch.zeros(1, requires_grad=True))
    y.backward(torch.ones(1))
    forward = ["use a", "use b", "[0.0] read on a", "[0.0] read on compute"]
    backward = ["use b", "use a", "[1.0] read on b", "[1.0] read on compute"]
    assert log == [*forward, *backward], "the allocator does not know the users"


@fails_with("a copy lacks a wait")
def a_pipe_waits_on_both_sides_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, Stash(), Pop())
    timeline.pipe(torch.ones(1, 1))
    there = ["wait compute0>copy0"] * 2, ["copy copy0>copy1"] * 2, ["wait copy1>compute1"] * 2
    assert timeline.take() == [event for events in there for event in events], "a copy lacks a wait"


# --- lanes of the train pipelines -----------------------------------------------------------------------------------


class Opens:
    """A lock that is released as soon as it is requested: then the work is done."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def acquire(self, timeout: Any) -> bool:
        self.work()
        return True

    def release(self) -> None: ...


@fails_with("the value was read before the job ran")
def a_ticket_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in (Ticket.wait, Ticket.synchronize):
        ticket: Any = Ticket()
        ticket._gate = Opens(lambda ticket=ticket: ticket.run(lambda: 7))
        ticket._value = None  # what its memory holds before the job
        wait(ticket)
        assert ticket._value == 7, "the value was read before the job ran"


@fails_with("read before the lane wrote it")
def the_host_comes_after_what_a_lane_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, home = LateCuda(monkeypatch), torch.zeros(3)
    InlineLane(LateStream()).submit(lambda: cuda.launch(lambda: home.fill_(7))).synchronize()
    assert (home == 7).all(), "read before the lane wrote it"


@fails_with("a wait ended before the work")
def waits_end_after_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for wait in (Future.wait, Future.synchronize, Future.run_or_wait, Future.cancel):
        log = []
        future = Future(lambda log=log: log.append("work"))
        future._begun, future._value, work = True, None, future._work.pop()  # a thread has it
        future._gate = Opens(lambda future=future, work=work: future._call(work))
        wait(future)
        assert log == ["work"], "a wait ended before the work"


@fails_with("the thread is still at work")
def a_thread_is_idle_after_all_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, log, wait_idle = threading.Event(), [], Future.wait_idle

    def late(future: Any) -> None:
        go_on.set()  # not before a waiter exists
        wait_idle(future)

    thread = Threads(1, "late")
    thread.submit(lambda: (go_on.wait(60), log.append("work")))
    monkeypatch.setattr(Future, "wait_idle", late)
    try:
        thread.wait_idle()
        assert log == ["work"], "the thread is still at work"
    finally:
        go_on.set()
        thread.close()


@fails_with("read before the lane wrote it")
def compute_comes_after_what_a_lane_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, batch, read = LateCuda(monkeypatch), torch.zeros(3), torch.zeros(3)
    ticket = InlineLane(LateStream()).submit(lambda: cuda.launch(lambda: batch.fill_(7)))
    ticket.wait()
    cuda.launch(lambda: read.copy_(batch))
    assert cuda.host_waits == 0, "the host waited"
    cuda.synchronize()
    assert (read == 7).all(), "read before the lane wrote it"


class ScaleOnDevice:
    """A number on a CUDA device, whose copies to the host arrive when the stream has run."""

    device = torch.device("cuda", 0)

    def __init__(self, cuda: LateCuda, value: float) -> None:
        self.cuda, self.value = cuda, value

    def to(self, device: torch.device, non_blocking: bool, copy: bool) -> torch.Tensor:
        there = torch.zeros(())
        self.cuda.launch(lambda: there.fill_(self.value))
        return there


@fails_with("gradients were multiplied before the scale was there")
def the_scale_of_a_grad_scaler_arrives_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect of torch: operations in host memory follow no stream."""
    cuda = LateCuda(monkeypatch)
    monkeypatch.setattr(_MultiDeviceReplicator, "get", inspect.unwrap(_MultiDeviceReplicator.get))
    amp.complete_copies_of_grad_scalers()
    amp.complete_copies_of_grad_scalers()
    copies: Any = _MultiDeviceReplicator(ScaleOnDevice(cuda, 0.5))
    found = [float(copies.get(torch.device("cpu"))) for _ in range(2)]
    assert found == [0.5, 0.5], "gradients were multiplied before the scale was there"
    _MultiDeviceReplicator(torch.ones(())).get(torch.device("cpu"))
    assert LateCuda.host_waits <= 1, "the host waited for what was there"


@fails_with("running work was not waited for")
def close_and_exit_come_after_work_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: Any = [Threads(1, "test"), Threads(1, "test", exit_seconds=1), Threads(1, "closed")]
    for pool in pools:
        pool._started.append(mock.Mock())
    monkeypatch.setattr(threads, "_alive", pools[:2])
    threads._finish_work()
    (closed,) = pools[2]._started
    pools[2].close(wait=True)
    assert closed.join.called, "running work was not waited for"
    assert all(pool._started[0].join.called for pool in pools[:2]), "running work was not waited for"


#: Each wait, and the scenario that fails without it.
TABLE = {
    "pipe.stream wait_stream: source.wait_stream(target)": a_stream_and_the_cpu_read_what_another_stream_wrote,
    "pipe.stream wait_stream: target.synchronize()": a_stream_and_the_cpu_read_what_another_stream_wrote,
    "pipe.stream record_stream: storage.record_stream(stream)": the_allocator_is_told_of_the_whole_storage,
    "pipe.copy _moved: record_stream(tensor, source)": a_copy_uses_both_copy_streams_and_tells_the_allocator,
    "pipe.copy _moved: record_stream(copied, reader)": a_copy_uses_both_copy_streams_and_tells_the_allocator,
    "pipe.copy Wait.forward: wait_stream(next_stream, prev_stream)": waits_order_both_directions,
    "pipe.copy Wait.backward: wait_stream(ctx.prev_stream, ctx.next_stream)": waits_order_both_directions,
    "pipe.pipeline Pipeline._run_cell: wait(value, copies, compute_stream)": a_pipe_waits_on_both_sides_of_a_copy,
    "pipe.pipeline Pipeline._run_cell: wait(outputs[k], compute_stream, copies)": a_pipe_waits_on_both_sides_of_a_copy,
    "pipe.train.lane Ticket._run_on: stream.record_event()": compute_comes_after_what_a_lane_issued,
    "pipe.train.lane Ticket.succeeded: self.wait_idle()": a_ticket_is_waited_for,
    "pipe.train.lane Ticket.succeeded: torch.cuda.current_stream(self._stream.device).wait_event(self._event)": (
        compute_comes_after_what_a_lane_issued
    ),
    "pipe.train.lane Ticket.wait: self.succeeded()": a_ticket_is_waited_for,
    "pipe.train.lane Ticket.synchronize: super().wait()": a_ticket_is_waited_for,
    "pipe.train.lane Ticket.synchronize: self._event.synchronize()": the_host_comes_after_what_a_lane_issued,
    "pipe.torch_private.amp complete_copies_of_grad_scalers: "
    "torch.cuda.current_stream(self.master.device).synchronize()": the_scale_of_a_grad_scaler_arrives_in_time,
    "pipe.threads Outcome.wait: self.wait_idle()": waits_end_after_the_work,
    "pipe.threads Future.run_or_wait: self.wait()": waits_end_after_the_work,
    "pipe.threads Future.cancel: self.wait_idle()": waits_end_after_the_work,
    "pipe.threads Threads.close: thread.join()": close_and_exit_come_after_work_that_runs,
    "pipe.threads Threads.wait_idle: barrier.wait_idle()": a_thread_is_idle_after_all_its_work,
    "pipe.threads _finish_work: thread.join(pool._exit_seconds)": close_and_exit_come_after_work_that_runs,
}

#: Waits whose value is used, and what has that value without waiting.
STAND_INS = {
    "pipe.train.lane Ticket._run_on: stream.record_event()": lambda stream: LateEvent(),  # which was never recorded
    "pipe.pipeline Pipeline._run_cell: wait(value, copies, compute_stream)": lambda value, *_: value,
    "pipe.pipeline Pipeline._run_cell: wait(outputs[k], compute_stream, copies)": lambda value, *_: value,
}

#: What is found by its name and does not wait.
EXCEPTIONS = {
    "pipe.threads Future: Outcome.wait": "another name of what is in this table",
    "pipe.threads Outcome.__init__: self._gate.acquire()": "a new lock, not shared yet",
    "pipe.threads Outcome.wait_idle: self._gate.acquire(timeout=RECHECK_SECONDS)": "without it the loop asks in vain",
    "pipe.threads _work: permits.acquire(blocking=False)": "does not wait",
    "pipe.pipeline Pipeline._run_cell: record()": "notes an action in a trace",
}

MODULES = dict.fromkeys(name.split()[0] for name in TABLE)
SITES = {str(site): site for site in find_sites([f"{module.replace('.', '/')}.py" for module in MODULES])}
SCENARIOS = {scenario.__name__: scenario for scenario in TABLE.values()}


def test_no_wait_is_forgotten() -> None:
    assert sorted(SITES) == sorted([*TABLE, *EXCEPTIONS])


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_with_all_waits(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENARIOS[name].assert_passes(monkeypatch)


@pytest.mark.parametrize("wait", sorted(TABLE))
def test_without_this_wait(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(SITES[wait], monkeypatch, STAND_INS.get(wait))
    TABLE[wait].assert_fails(monkeypatch)


def test_every_used_value_has_a_stand_in() -> None:
    assert set(STAND_INS) == {wait for wait in TABLE if is_value_used(SITES[wait])}
