"""Copies and waits change places and order, not values, gradients, or what needs one."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe, pipeline
from pipe import copy as copies
from pipe.copy import Copy, Wait
from pipe.nested import map_tensors
from pipe.stream import (
    CPUStream,
    current_stream,
    get_device,
    is_cuda,
    new_stream,
    normalize_device,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

CPU = torch.device("cpu")


def test_streams_of_the_cpu_are_one_placeholder_and_all_cpus_one_device() -> None:
    assert normalize_device("cpu") == normalize_device(torch.device("cpu", 1)) == get_device(CPUStream) == CPU
    assert not is_cuda(CPUStream)
    with use_device(CPU), use_stream(CPUStream):
        wait_stream(CPUStream, CPUStream)
        record_stream(torch.ones(1), CPUStream)
        assert new_stream(CPU) is current_stream(CPU) is CPUStream


@pytest.mark.parametrize("function", [Copy, Wait])
class TestBoth:
    def test_values_and_gradients_pass(self, function: Any) -> None:
        x, y = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
        a, b = function.apply(CPUStream, CPUStream, x, y)
        assert torch.equal(a, x)
        (a.sum() * 2 + b.sum() * 3).backward()
        assert x.grad.tolist() == [2.0] * 3
        assert y.grad.tolist() == [3.0] * 2

    def test_only_what_needed_a_gradient_needs_one(self, function: Any) -> None:
        tensors = (
            torch.ones(1, requires_grad=True),
            torch.ones(1),
            torch.arange(2),
            torch.ones(1, dtype=torch.complex64),
        )
        assert [t.requires_grad for t in function.apply(CPUStream, CPUStream, *tensors)] == [True, False, False, False]

    def test_an_absent_gradient_stays_absent_and_without_grad_mode_there_is_no_graph(self, function: Any) -> None:
        x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        function.apply(CPUStream, CPUStream, x, y)[1].backward()
        assert x.grad is None
        with torch.no_grad():
            assert not function.apply(CPUStream, CPUStream, x)[0].requires_grad


class FakeStream:
    """Stands for a CUDA stream; the functions of ``pipe.stream`` are replaced by ones that log."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __repr__(self) -> Any:
        return self.name


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Any:
    events = []

    @contextlib.contextmanager
    def use(s: Any) -> Any:
        events.append(f"use {s}")
        yield

    monkeypatch.setattr(copies, "use_stream", use)
    monkeypatch.setattr(copies, "wait_stream", lambda source, target: events.append(f"{source} waits for {target}"))
    monkeypatch.setattr(copies, "get_device", lambda s: CPU)
    monkeypatch.setattr(copies, "record_stream", lambda tensor, s: events.append(f"{tensor.tolist()} read on {s}"))
    monkeypatch.setattr(copies, "current_stream", lambda device: "compute")
    return events


def test_a_copy_runs_on_both_copy_streams_and_tells_the_allocator_in_both_directions(log: Any) -> None:
    x = torch.zeros(1, requires_grad=True)
    (y,) = Copy.apply(FakeStream("a"), FakeStream("b"), x)
    assert log == ["use a", "use b", "[0.0] read on a", "[0.0] read on compute"]
    log.clear()
    y.backward(torch.ones(1))
    assert log == ["use b", "use a", "[1.0] read on b", "[1.0] read on compute"]


class Timeline:
    """Runs a two-stage pipe on the CPU that takes its stages for two devices, and logs what a CUDA one would do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checkpoint: Any) -> None:
        self.events = events = []

        def logged(name: Any) -> Any:
            def function(value: Any, prev: Any, to: Any) -> Any:
                events.append(f"{name} {prev}>{to}")
                return map_tensors(lambda t: Logged.apply(events, f"{name} {to}>{prev}", t), value)

            return function

        class Layer(nn.Module):
            def __init__(self, name: Any) -> None:
                super().__init__()
                self.name = name
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x: Any) -> Any:
                events.append(f"run {self.name}")
                return Logged.apply(events, f"back {self.name}", x * self.weight)

        monkeypatch.setattr(pipeline, "copy", logged("copy"))
        monkeypatch.setattr(pipeline, "wait", logged("wait"))
        monkeypatch.setattr(pipeline, "current_stream", lambda device: f"compute{device.index}")
        monkeypatch.setattr(pipeline, "copy_stream", lambda device, j, i: f"copy{j}")
        self.pipe = Pipe(nn.Sequential(Layer("A"), Layer("B")), [1, 1], chunks=1, checkpoint=checkpoint)
        for j, stage in enumerate(self.pipe._stages):
            stage.device = torch.device("cpu", j)

    def take(self) -> Any:
        events, self.events[:] = list(self.events), []
        return events


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, events: Any, name: Any, x: Any) -> Any:
        ctx.events, ctx.name = events, name
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.events.append(ctx.name)
        return None, None, gradient


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_every_copy_has_a_wait_on_both_sides_and_recomputation_precedes_the_wait(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    timeline = Timeline(monkeypatch, checkpoint)
    y = timeline.pipe(torch.ones(1, 1))
    assert timeline.take() == ["run A", "wait compute0>copy0", "copy copy0>copy1", "wait copy1>compute1", "run B"]
    y.sum().backward()
    again = checkpoint == "always"
    assert timeline.take() == [
        *(["run B"] if again else []),
        "back B",
        "wait compute1>copy1",
        "copy copy1>copy0",
        # While the gradient is on its way, stage 0 computes again.
        *(["run A"] if again else []),
        "wait copy0>compute0",
        "back A",
    ]


def test_stages_of_one_device_need_no_copies_and_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("copy", "wait"):
        monkeypatch.setattr(pipeline, name, lambda *args, name=name: called.append(name))
    Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], chunks=2)(torch.ones(2, 1)).sum().backward()
    assert not called


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_to_a_cuda_device_and_back_keeps_values_and_gradients() -> None:
    device = torch.device("cuda", 0)
    to = new_stream(device)
    x = torch.randn(1000, requires_grad=True)
    (y,) = Copy.apply(CPUStream, to, x)
    (y,) = Wait.apply(to, current_stream(device), y)
    assert y.device == device
    (y * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((1000,), 2.0))
