"""Mutation tests of pipe: without any one wait or event of streams, copies, workers and lanes, late work is noticed.

The waits between the stages of a train pipeline have a table of their own (``train/test_waits.py``).
"""

import threading
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe, skip, stream
from pipe.copy import Copy, Wait
from pipe.stream import CPUStream, wait_stream
from pipe.train import lane
from pipe.train.lane import InlineLane, ThreadLane, Ticket
from pipe.worker import spawn_workers
from tests.guarded import Condition, Guarded
from tests.late_cuda import LateCuda, LateEvent, LateStream
from tests.pipe.test_copy import Timeline
from tests.waits import fails_with, find_sites, is_value_used, take_out

# --- streams --------------------------------------------------------------------------------------------------------


@fails_with("read before it was written")
def a_stream_reads_what_another_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, a, b = LateCuda(monkeypatch), LateStream(), LateStream()
    boundary, read = torch.zeros(3), torch.zeros(3)
    with cuda.on(a):
        cuda.launch(lambda: boundary.fill_(7))
    wait_stream(b, a)
    with cuda.on(b):
        cuda.launch(lambda: read.copy_(boundary))
    b.synchronize()
    assert (read == 7).all(), "read before it was written"


@fails_with("read before it was written")
def the_cpu_reads_what_a_stream_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, a, boundary = LateCuda(monkeypatch), LateStream(), torch.zeros(3)
    with cuda.on(a):
        cuda.launch(lambda: boundary.fill_(7))
    wait_stream(CPUStream, a)
    assert (boundary == 7).all(), "read before it was written"


@fails_with("the allocator does not know the user")
def the_allocator_is_told_of_the_whole_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []

    class Storage:
        def set_(self, storage: Any) -> Any:
            return self

        def record_stream(self, user: Any) -> None:
            log.append(user)

    class OnDevice(torch.Tensor):
        is_cuda = True

    user = LateStream()
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Storage())
    stream.record_stream(torch.zeros(3).as_subclass(OnDevice), user)
    assert log == [user], "the allocator does not know the user"


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
def a_copy_tells_the_allocator_who_uses_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    log = []
    source, target = LateStream(), CPUStream
    LateCuda(monkeypatch)
    monkeypatch.setattr("pipe.copy.record_stream", lambda tensor, user: log.append(user))
    Copy.apply(source, target, torch.zeros(1))
    assert log == [source, CPUStream], "the allocator does not know the users"


@skip.skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Any) -> Any:
        yield skip.stash("x", x)
        return x


@skip.skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + (yield skip.pop("x"))


@fails_with("a copy lacks a wait")
def a_pipe_waits_on_both_sides_of_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, "never")
    pipe = Pipe(nn.Sequential(Stash(), Pop()), [1, 1], chunks=1, checkpoint="never")
    for j, stage in enumerate(pipe._stages):
        stage.device = torch.device("cpu", j)
    pipe._copy_streams = [["copy0"], ["copy1"]]
    pipe(torch.ones(1, 1))
    there = ["wait compute0>copy0"] * 2, ["copy copy0>copy1"] * 2, ["wait copy1>compute1"] * 2
    assert timeline.take() == [event for events in there for event in events], "a copy lacks a wait"


# --- threads --------------------------------------------------------------------------------------------------------


class Thread:
    """Notes whether it was waited for."""

    def __init__(self, **_: Any) -> None:
        self.joined = False

    def start(self) -> None: ...

    def join(self, timeout: Any = None) -> None:
        self.joined = True


@fails_with("a worker was not joined")
def workers_have_ended_when_their_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("pipe.worker.Thread", lambda **_: made.append(Thread()) or made[-1])
    with spawn_workers([torch.device("cpu")]):
        pass
    assert [thread.joined for thread in made] == [True], "a worker was not joined"


# --- lanes of the train pipelines -----------------------------------------------------------------------------------


@fails_with("the ticket does not know that it is done")
def a_ticket_is_done_after_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket()
    ticket.run(lambda: 7)
    assert ticket.done, "the ticket does not know that it is done"
    assert ticket.wait() == 7


@fails_with("the value was read before the job ran")
def a_ticket_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket()

    class Late(threading.Event().__class__):
        def wait(self) -> None:
            ticket.run(lambda: 7)

    ticket._done = Late()
    ticket._value = None  # what its memory holds before the job
    assert ticket.wait() == 7, "the value was read before the job ran"


@fails_with("read before the lane wrote it")
def compute_comes_after_what_a_lane_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, batch, read = LateCuda(monkeypatch), torch.zeros(3), torch.zeros(3)
    ticket = InlineLane(LateStream()).submit(lambda: cuda.launch(lambda: batch.fill_(7)))
    ticket.wait()
    cuda.launch(lambda: read.copy_(batch))
    assert cuda.host_waits == 0, "the host waited"
    cuda.synchronize()
    assert (read == 7).all(), "read before the lane wrote it"


@fails_with("the queue was read without its lock")
def a_lane_and_its_thread_never_look_at_its_jobs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipe.train.lane.threading.Thread", Thread)
    a = ThreadLane("test")
    a._lock = Condition()
    a._jobs = Guarded(a._lock)
    ticket = a.submit(lambda: 7)
    a._drain()
    assert ticket.wait() == 7
    a._cancel()


@fails_with("a running job was not waited for")
def the_interpreter_ends_after_jobs_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    a = ThreadLane("test")
    a._thread = Thread()
    monkeypatch.setattr(lane, "_lanes", [a])
    lane._cancel_at_exit()
    assert a._thread.joined, "a running job was not waited for"


WAITS = {
    "pipe.stream": {
        "wait_stream": [
            ("source.wait_stream(target)", a_stream_reads_what_another_wrote),
            ("target.synchronize()", the_cpu_reads_what_a_stream_wrote),
        ],
        "record_stream": [("storage.record_stream(stream)", the_allocator_is_told_of_the_whole_storage)],
    },
    "pipe.copy": {
        "_moved": [
            ("record_stream(tensor, source)", a_copy_tells_the_allocator_who_uses_its_ends),
            ("record_stream(copied, reader)", a_copy_tells_the_allocator_who_uses_its_ends),
        ],
        "Wait.forward": [("wait_stream(next_stream, prev_stream)", waits_order_both_directions)],
        "Wait.backward": [("wait_stream(ctx.prev_stream, ctx.next_stream)", waits_order_both_directions)],
    },
    "pipe.pipeline": {
        "Pipeline._task": [
            (
                "wait(self.batches[i], self.copy_streams[j][i], compute_stream)",
                a_pipe_waits_on_both_sides_of_every_copy,
            ),
            ("wait(skip, self.copy_streams[j][i], compute_stream)", a_pipe_waits_on_both_sides_of_every_copy),
        ],
        "Pipeline._finish": [
            ("wait(main, self._streams[j], leaving)", a_pipe_waits_on_both_sides_of_every_copy),
            ("wait(skip, self._streams[j], leaving)", a_pipe_waits_on_both_sides_of_every_copy),
        ],
    },
    "pipe.worker": {"spawn_workers": [("thread.join()", workers_have_ended_when_their_context_ends)]},
    "pipe.train.lane": {
        "Ticket.run": [
            ("stream.record_event()", compute_comes_after_what_a_lane_issued),
            ("self._done.set()", a_ticket_is_done_after_its_job),
        ],
        "Ticket.succeeded": [
            ("self._done.wait()", a_ticket_is_waited_for),
            (
                "torch.cuda.current_stream(self._stream.device).wait_event(self._event)",
                compute_comes_after_what_a_lane_issued,
            ),
        ],
        "Ticket.wait": [("self.succeeded()", a_ticket_is_waited_for)],
        "ThreadLane.submit": [("with self._lock", a_lane_and_its_thread_never_look_at_its_jobs_together)],
        "ThreadLane._drain": [("with self._lock", a_lane_and_its_thread_never_look_at_its_jobs_together)],
        "ThreadLane._cancel": [("with self._lock", a_lane_and_its_thread_never_look_at_its_jobs_together)],
        "_cancel_at_exit": [("thread.join(_EXIT_SECONDS)", the_interpreter_ends_after_jobs_that_run)],
    },
}

#: Waits whose value is used, and what has that value without waiting.
STAND_INS = {
    "pipe.train.lane Ticket.run: stream.record_event()": lambda stream: LateEvent(),  # which was never recorded
    "pipe.train.lane Ticket.wait: self.succeeded()": lambda ticket: ticket._error is None,
}

#: What is found by its name and does not wait.
EXCEPTIONS = {
    "pipe.pipeline _join: join(batch[k], phony)": "an order of backward, in the graph (test_dependency)",
    "pipe.pipeline Pipeline._finish: join(held, phony)": "the same",
    "pipe.pipeline Pipeline.run: self._fence(cells)": "calls what is in this table",
    "pipe.pipeline Pipeline.run: self._finish(i, j, task, output)": "calls what is in this table",
    "pipe.pipeline _recorded: record(action)": "notes an action in a trace",
    "pipe.pipeline _Mark.backward: ctx.record(ctx.action)": "notes an action in a trace",
}

TABLE = {
    f"{module} {function}: {text}": scenario
    for module, functions in WAITS.items()
    for function, waits in functions.items()
    for text, scenario in waits
}
SITES = {str(site): site for site in find_sites([f"{module.replace('.', '/')}.py" for module in WAITS])}
SCENARIOS = {scenario.__name__: scenario for scenario in TABLE.values()}


def test_no_wait_is_forgotten() -> None:
    assert sorted(SITES) == sorted([*TABLE, *EXCEPTIONS])


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_with_all_waits(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    SCENARIOS[name](monkeypatch)


@pytest.mark.parametrize("wait", sorted(TABLE))
def test_without_this_wait(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(SITES[wait], monkeypatch, STAND_INS.get(wait))
    TABLE[wait].fails(monkeypatch)


def test_every_used_value_has_a_stand_in() -> None:
    assert set(STAND_INS) == {wait for wait in TABLE if is_value_used(SITES[wait])}
