"""Streams and events, without a device: what each stream knows to be done when a stage is issued on it.

A stream knows what was issued on it, and what the events that it waited for had known when they were recorded. A stage
that is issued on a stream which does not know of the work that it needs would run too early on a device.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
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
from tests.pipe.train.conftest import FakeCached


class Stream:
    """Stands in for a CUDA stream."""

    device = torch.device("cuda", 0)

    def __init__(self, name: Any) -> None:
        self.name, self.known = name, set()

    def record_event(self) -> Any:
        return SimpleNamespace(known=frozenset(self.known))

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


def train(lab: Any, kind: Any, machine: Any) -> None:
    """Six batches in the pipeline, each stage of which (but load) is issued on the machine."""
    numbers = {}

    def noting(name: Any) -> Any:
        def work(self: Any, batch: Any) -> None:
            machine.issue(name, numbers.setdefault(batch, len(numbers)))
            getattr(kind, f"_{name}")(self, batch)

        return work

    observed = type("Observed", (kind,), {f"_{name}": noting(name) for name in [*kind._stages[1:], "forward"]})
    model = lab.sparse_model(FakeCached)
    pipeline = observed(model, lab.optimizer(model), "cpu", lanes=machine.lanes())
    assert len(lab.run(pipeline, iter(lab.batches(6)))) == 6


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])
def test_every_stage_is_issued_on_a_stream_that_waits_for_the_stages_before_and_for_no_compute(
    lab: Any, machine: Any, kind: Any
) -> None:
    train(lab, kind, machine)
    chain = [*kind._stages[1:], "forward"]
    for k, stage in enumerate(chain):
        for i in range(6):
            if i or stage in ("copy", "forward"):  # the first batch is not distributed ahead
                needed = {(name, i) for name in chain[:k] if i or name == "copy"}
                assert needed <= machine.seen[stage, i], (stage, i)
        assert stage == "forward" or not any(name == "forward" for name, _ in machine.seen[stage, 5])
    assert all(machine.seen["copy", i] == {("copy", k) for k in range(i)} for i in range(6))


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
