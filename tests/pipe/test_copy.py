"""Copies and waits change places and order, not values, gradients, or what needs one."""

from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe, pipeline
from pipe.copy import Copy, Wait
from pipe.nested import map_tensors
from pipe.step import PipelineStep
from pipe.stream import CPUStream, current_stream, new_stream, to_device
from tests.late_cuda import LateCuda
from tests.pipe.test_checkpoint import Log

CPU = torch.device("cpu")


@pytest.mark.parametrize("function", [Copy, Wait])
class TestBoth:
    def test_values_and_gradients_pass_and_an_absent_gradient_stays_absent(self, function: Any) -> None:
        x, y, z = (torch.randn(n, requires_grad=True) for n in (3, 2, 1))
        a, b, _ = function.apply(CPUStream, CPUStream, x, y, z)
        assert torch.equal(a, x)
        (a.sum() * 2 + b.sum() * 3).backward()
        assert (x.grad.tolist(), y.grad.tolist(), z.grad) == ([2.0] * 3, [3.0] * 2, None)

    def test_only_what_needed_a_gradient_needs_one(self, function: Any) -> None:
        leaf, number = torch.ones(1, requires_grad=True), torch.ones(1, dtype=torch.complex64)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found = function.apply(CPUStream, CPUStream, leaf, torch.ones(1), torch.arange(2), number)
            assert [t.requires_grad for t in found] == [grad, False, False, False]


class Timeline:
    """Runs a pipe on the CPU, a layer a stage, that takes its stages for devices, and logs what a CUDA one would do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *layers: nn.Module, checkpoint: Any = "never") -> None:
        self.events = events = []

        def logged(name: Any) -> Any:
            def function(value: Any, prev: Any, to: Any) -> Any:
                events.append(f"{name} {prev}>{to}")
                return map_tensors(lambda t: Log.apply(events, f"{name} {to}>{prev}", t), value)

            return function

        class Layer(nn.Module):
            def __init__(self, name: Any) -> None:
                super().__init__()
                self.name = name
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x: Any) -> Any:
                events.append(f"run {self.name}")
                return Log.apply(events, f"back {self.name}", x * self.weight)

        monkeypatch.setattr(pipeline, "copy", logged("copy"))
        monkeypatch.setattr(pipeline, "wait", logged("wait"))
        monkeypatch.setattr(pipeline, "current_stream", lambda device: f"compute{device.index}")
        monkeypatch.setattr(pipeline, "copy_stream", lambda device, j, i: f"copy{j}")
        model = nn.Sequential(*(layers or (Layer("A"), Layer("B"))))
        self.pipe = Pipe(model, [1] * len(model), chunks=1, checkpoint=checkpoint)
        for j, stage in enumerate(self.pipe._stages):
            stage.device = torch.device("cpu", j)

    def take(self) -> Any:
        events, self.events[:] = list(self.events), []
        return events


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_every_copy_has_a_wait_on_both_sides_and_recomputation_precedes_the_wait(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Any
) -> None:
    timeline = Timeline(monkeypatch, checkpoint=checkpoint)
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


@pytest.mark.parametrize(
    ("locked", "device", "goes_on"), [(False, "cuda", True), (True, "cuda", False), (True, "cpu", False)]
)
def test_a_copy_of_page_locked_memory_ends_before_the_call(locked: bool, device: str, goes_on: bool) -> None:
    """Twin in offload: test_model.py. A loader may fill that memory anew as soon as the call returns."""
    asked: list[bool] = []

    class Input(torch.Tensor):
        def is_pinned(self, device: object = None) -> bool:
            return locked

        def to(self, device: torch.device, *, non_blocking: bool) -> Any:
            asked.append(non_blocking)
            return self

    to_device(torch.zeros(3).as_subclass(Input), torch.device(device, 0))
    assert asked == [goes_on]


def test_a_gradient_for_a_stage_in_host_memory_is_there_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage on a device: the backward of the stage before runs on the host, which follows no stream."""
    cuda, step = LateCuda(monkeypatch), PipelineStep([], [], [], [], [])

    class Leaf:
        is_cuda = True

        @property
        def grad(self) -> Any:
            return self

        def to(self, device: torch.device, non_blocking: bool) -> torch.Tensor:
            there = torch.zeros(2, device=device)
            cuda.launch(lambda: there.fill_(7))
            if not non_blocking:
                cuda.synchronize()
            return there

    step._sources[1, 0] = [(Leaf(), torch.zeros(2), 0)]  # type: ignore[list-item]
    step._backward(1, 0)
    ((_, gradient),) = step._gradients[0, 0]
    assert gradient is not None
    assert (gradient == 7).all(), "read before it was copied"


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
