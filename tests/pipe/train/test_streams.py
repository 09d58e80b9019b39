"""Streams and events, without a device: what each stream knows to be done when a stage is issued on it.

A stream knows what was issued on it, and what the events that it waited for had known when they were recorded. A stage
that is issued on a stream which does not know of the work that it needs would run too early on a device.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from offload import OffloadEmbeddingBag
from pipe.train import (
    InlineLane,
    Lanes,
    PrefetchTrainPipelineSparseDist,
    ThreadLane,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from pipe.train.lane import Ticket


class Event:
    def __init__(self, known: Any) -> None:
        self.known = frozenset(known)


class Stream:
    """Stands in for a CUDA stream."""

    device = torch.device("cuda", 0)

    def __init__(self, name: Any) -> None:
        self.name, self.known = name, set()

    def record_event(self) -> Any:
        return Event(self.known)

    def wait_event(self, event: Any) -> None:
        self.known |= event.known


class Machine:
    """The current stream of each thread, and what the current stream knew when something was issued on it."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.compute = Stream("compute")
        self.seen = {}

    def current(self, device: Any = None) -> Any:
        return getattr(self.local, "stream", self.compute)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Any:
        if stream is None:
            yield
            return
        before = self.current()
        self.local.stream = stream
        yield
        self.local.stream = before

    def issue(self, name: Any, batch: Any) -> None:
        stream = self.current()
        self.seen[name, batch] = set(stream.known)
        stream.known.add((name, batch))

    def lanes(self) -> Any:
        return Lanes(
            load=ThreadLane("load"),
            copy=ThreadLane("copy", Stream("copy")),
            distribute=InlineLane(Stream("distribute")),
            prefetch=InlineLane(Stream("prefetch")),
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "stream", machine.on)
    monkeypatch.setattr(torch.cuda, "current_stream", machine.current)
    return machine


def observed(kind: Any, machine: Any) -> Any:
    """The pipeline, each stage of which is issued on the machine."""

    numbers = {}

    def noting(name: Any) -> Any:
        def work(self: Any, batch: Any) -> None:
            machine.issue(name, numbers.setdefault(batch, len(numbers)))
            getattr(kind, f"_{name}")(self, batch)

        return work

    return type("Observed", (kind,), {f"_{name}": noting(name) for name in NEEDS[kind].keys() | {"copy"}})


def train(lab: Any, kind: Any, machine: Any, count: Any = 6) -> Any:
    model = lab.cached_model()
    pipeline = observed(kind, machine)(model, lab.optimizer(model), "cpu", lanes=machine.lanes())
    assert len(lab.run(pipeline, iter(lab.batches(count)))) == count
    return pipeline


NEEDS = {
    TrainPipelineBase: {"forward": ["copy"]},
    TrainPipelineSparseDist: {
        "distribute": ["copy"],
        "exchange": ["distribute", "copy"],
        "forward": ["exchange", "distribute", "copy"],
    },
    PrefetchTrainPipelineSparseDist: {
        "distribute": ["copy"],
        "exchange": ["distribute", "copy"],
        "prefetch": ["exchange", "distribute", "copy"],
        "forward": ["prefetch", "exchange", "distribute", "copy"],
    },
}


@pytest.mark.parametrize("kind", list(NEEDS))
def test_every_stage_is_issued_on_a_stream_that_waits_for_what_it_needs(lab: Any, machine: Any, kind: Any) -> None:
    train(lab, kind, machine)
    for stage, needed in NEEDS[kind].items():
        for i in range(6):
            if i or stage == "forward":  # the first batch is not distributed ahead
                expected = {(name, i) for name in needed if i or name == "copy"}
                assert expected <= machine.seen[stage, i], (stage, i)


@pytest.mark.parametrize("kind", list(NEEDS))
def test_copies_do_not_wait_for_compute(lab: Any, machine: Any, kind: Any) -> None:
    train(lab, kind, machine)
    for i in range(6):
        assert machine.seen["copy", i] == {("copy", k) for k in range(i)}
    for stage in NEEDS[kind].keys() & {"distribute", "exchange", "prefetch"}:
        assert not any(name == "forward" for name, _ in machine.seen[stage, 5])


@pytest.mark.parametrize("kind", list(NEEDS))
def test_without_the_events_a_stage_would_be_issued_too_early(
    lab: Any, machine: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def succeeded(ticket: Any) -> Any:  # waits on the host alone
        ticket.wait_idle()
        return ticket._error is None

    monkeypatch.setattr(Ticket, "succeeded", succeeded)
    train(lab, kind, machine)
    assert ("copy", 3) not in machine.seen["forward", 3]


def test_a_lookup_is_issued_behind_the_rows_and_rows_behind_the_indices(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    bag = OffloadEmbeddingBag(10, 2, "sum")
    bag.lane = ThreadLane("rows", Stream("rows"))

    def fence(device: Any) -> Any:
        ticket = Ticket()
        ticket.run(lambda: None, machine.current())
        return ticket

    monkeypatch.setattr("offload.embedding.bag.fence", fence)
    read = bag._read

    def noted(input: Any, before: Any) -> Any:
        result = read(input, before)
        machine.issue("rows", 0)
        return result

    bag._read = noted
    machine.issue("indices", 0)
    request = bag.input_dist(None, torch.tensor([[1, 2]])).wait().wait()
    bag.compute_and_output_dist(None, request)
    machine.issue("lookup", 0)
    assert ("indices", 0) in machine.seen["rows", 0]
    assert ("rows", 0) in machine.seen["lookup", 0]
