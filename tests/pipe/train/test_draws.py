"""Random numbers have an owner: loader and model draw what they draw in a plain loop, whatever the threads do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipe.train import InlineLane, Lane, Lanes, Ticket, TrainPipelineBase
from tests.pipe.train.conftest import BOTH, LateLane


class EagerLane(Lane):
    """The loader's thread at its fastest: a batch is read the moment that it is asked for."""

    def submit(self, job: Callable[[], Any]) -> Ticket[Any]:
        return InlineLane().submit(job)


def lanes(load: Any) -> Lanes | None:
    return load and Lanes(load=load(), copy=InlineLane(), distribute=InlineLane())


SPEEDS = pytest.mark.parametrize("load", [EagerLane, LateLane, None], ids=["eager", "late", "thread"])


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


DRAW: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.random,
    "nothing": lambda: 1.0,
}


class Drawing(nn.Module):
    """Scales its loss by a number that it draws in training."""

    def __init__(self, source: str = "torch", log: list[str] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.source, self.log = source, log if log is not None else []

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.log.append("forward")
        factor = DRAW[self.source]() if self.training else 1.0
        output = (self.weight * (batch[0] if isinstance(batch, list) else batch)).sum() * factor
        return output.square(), output.detach()


def drawing_loader(source: str, count: int, log: list[str] | None = None) -> Iterator[Tensor]:
    for k in range(count):
        if log is not None:
            log.append("read")
        yield torch.full((3,), DRAW[source]() + k)


def plain(model: nn.Module, loader: Iterator[Any], size: int = 1, between: str = "nothing") -> list[Any]:
    """``for batch in loader: step``, with a mean over windows, the last of which is whole."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), 0.1), []
    for k, batch in enumerate(loader):
        if k % size == 0:
            optimizer.zero_grad()
        losses, output = model(batch)
        (losses / size).backward()
        if k % size == size - 1:
            optimizer.step()
        outputs.append((output, DRAW[between]()))
    return outputs


def pipelined(pipeline: Any, loader: Iterator[Any], between: str = "nothing") -> list[Any]:
    outputs = []
    while True:
        try:
            output = pipeline.progress(loader)
        except StopIteration:
            return outputs
        outputs.append((output, DRAW[between]()))


def check(
    make: Any,
    load: Any,
    loader: Callable[[], Iterator[Any]],
    *,
    source: str = "torch",
    size: int = 1,
    between: str = "nothing",
) -> Any:
    """Trains in a plain loop and in a pipeline: outputs, weights and the draws after them are the same."""
    ways = []
    for way in ("plain", "pipelined"):
        model = Drawing(source)
        seed()
        if way == "plain":
            outputs = plain(model, loader(), size, between)
        else:
            pipeline = make(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", grad_accum=size, lanes=lanes(load))
            outputs = pipelined(pipeline, loader(), between)
        ways.append((outputs, model.weight.tolist(), [draw() for draw in DRAW.values()]))
    assert ways[0] == ways[1]
    return pipeline.statistics()


@BOTH
@SPEEDS
@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_and_model_of_one_generator_draw_as_in_a_loop(make: Any, load: Any, source: Any, size: Any) -> None:
    statistics = check(make, load, lambda: drawing_loader(source, 8), source=source, size=size)
    assert statistics.batches_in_turn == 7


@BOTH
def test_the_code_around_the_pipeline_draws_as_in_a_plain_loop_too(make: Any) -> None:
    check(make, EagerLane, lambda: drawing_loader("torch", 8), source="nothing", between="torch")


@pytest.mark.parametrize(
    ("loader", "order"),
    [
        ("nothing", "read read read forward read forward read forward forward forward"),
        # One batch in turn tells what the model draws: nothing that the loader draws.
        ("numpy", "read forward read read read forward read forward forward forward"),
    ],
)
def test_a_loader_that_draws_nothing_that_the_model_draws_is_read_ahead_once_known(loader: Any, order: Any) -> None:
    log: list[str] = []
    model = Drawing("torch", log)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", lanes=lanes(EagerLane))
    pipelined(pipeline, drawing_loader(loader, 5, log))
    assert " ".join(log) == order


DATA = TensorDataset(torch.arange(24.0).reshape(8, 3) / 24)


def test_a_loader_of_torch_that_draws_seeds_alone_is_read_ahead_behind_them() -> None:
    statistics = check(TrainPipelineBase, EagerLane, lambda: iter(DataLoader(DATA, shuffle=True)))
    assert statistics.batches_in_turn == 1


def test_an_endless_loader_that_draws_seeds_again_and_again_is_read_in_turn() -> None:
    def endless() -> Iterator[Any]:
        for _ in range(3):
            yield from DataLoader(DATA, shuffle=True)

    check(TrainPipelineBase, EagerLane, endless)


@SPEEDS
def test_a_model_that_draws_in_training_alone_is_watched_anew_when_its_mode_changes(load: Any) -> None:
    model = Drawing("torch").eval()
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.0), "cpu", lanes=lanes(load))
    loader = drawing_loader("torch", 12)
    seed()
    drawn = [DRAW["torch"]() for _ in range(20)]
    seed()
    found = [float(pipeline.progress(loader)) / 3 for _ in range(4)]
    model.train()
    # Batches in flight were read ahead: with 2 ahead the loader has drawn 6 numbers, and the model now draws the next.
    found += [float(pipeline.progress(loader)) / 3 for _ in range(8)]
    factors = [1.0] * 4 + drawn[6:8] + drawn[9::2]
    batches = [number + k for k, number in enumerate(drawn[:6] + drawn[8::2])]
    assert found == pytest.approx([batch * factor for batch, factor in zip(batches, factors, strict=True)])


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_nothing_ahead_a_batch_may_depend_on_what_became_of_the_one_before(lab: Any, make: Any, size: Any) -> None:
    outputs: list[Tensor] = []

    def feedback(so_far: Any) -> Iterator[Tensor]:
        """Its next batch is the model's latest output."""
        for k in range(7):
            assert len(so_far) == k, "read before the output that the batch is made of"
            yield 1 / (1 + so_far[-1].expand(3)) if so_far else torch.full((3,), 0.5)

    model, ahead = Drawing("nothing"), dict.fromkeys(make.default_ahead, 0)
    pipeline = make(model, torch.optim.SGD(model.parameters(), 0.1), "cpu", grad_accum=size, ahead=ahead)
    loader = feedback(outputs)
    while len(outputs) < 7:
        outputs.append(pipeline.progress(loader))
    with pytest.raises(StopIteration):
        pipeline.progress(loader)
    reference = Drawing("nothing")
    batches = [torch.full((3,), 0.5), *(1 / (1 + output.expand(3)) for output in outputs[:-1])]
    expected = lab.plain_loop(reference, [batches], size, torch.optim.SGD(reference.parameters(), 0.1))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(model.weight, reference.weight)
    assert pipeline.statistics().steps == -(-7 // size)
