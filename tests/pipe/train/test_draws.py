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

from pipe.train import InlineLane, Lane, Lanes, Ticket, TrainPipelineBase, TrainPipelineSparseDist

BOTH = pytest.mark.parametrize("make", [TrainPipelineBase, TrainPipelineSparseDist])


class EagerLane(Lane):
    """The loader's thread at its fastest: a batch is read the moment that it is asked for."""

    def submit(self, job: Callable[[], Any]) -> Ticket[Any]:
        return InlineLane().submit(job)


def lanes(load: Lane) -> Lanes:
    return Lanes(load=load, copy=InlineLane(), distribute=InlineLane())


def draw(source: str) -> float:
    if source == "torch":
        return float(torch.rand(()))
    return random.random() if source == "python" else float(np.random.random())


class Drawing(nn.Module):
    """Scales its loss by a number that it draws in training."""

    def __init__(self, source: str, log: list[str] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.source, self.log = source, log if log is not None else []

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.log.append("forward")
        factor = draw(self.source) if self.training else 1.0
        output = (self.weight * batch).sum() * factor
        return output.square(), output.detach()


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def drawing_loader(source: str, count: int, log: list[str] | None = None) -> Iterator[Tensor]:
    for _ in range(count):
        if log is not None:
            log.append("read")
        yield torch.full((3,), draw(source))


def plain(model: nn.Module, loader: Iterator[Tensor], size: int = 1, between: Callable[[], Any] = int) -> list[Any]:
    """``for batch in loader: step``, with a mean over windows."""
    optimizer, outputs = torch.optim.SGD(model.parameters(), 0.1), []
    for k, batch in enumerate(loader):
        if k % size == 0:
            optimizer.zero_grad()
        losses, output = model(batch)
        (losses / size).backward()
        if k % size == size - 1:
            optimizer.step()
        outputs.append((output, between()))
    return outputs


def pipelined(pipeline: Any, loader: Iterator[Tensor], between: Callable[[], Any] = int) -> list[Any]:
    outputs = []
    while True:
        try:
            output = pipeline.progress(loader)
        except StopIteration:
            return outputs
        outputs.append((output, between()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@BOTH
@pytest.mark.parametrize("speed", ["eager", "late", "thread"])
@pytest.mark.parametrize("source", ["torch", "python", "numpy"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_loader_and_a_model_that_draw_from_one_generator_draw_as_in_a_plain_loop(
    lab: Any, make: Any, speed: Any, source: Any, size: Any
) -> None:
    load = {"eager": EagerLane, "late": lab.LateLane, "thread": lambda: None}[speed]()
    reference, model = Drawing(source), Drawing(source)
    seed()
    expected = plain(reference, drawing_loader(source, 8), size)
    after = draw(source)
    seed()
    pipeline = make(model, sgd(model), "cpu", grad_accum=size, lanes=load and lanes(load))
    assert pipelined(pipeline, drawing_loader(source, 8)) == expected
    assert draw(source) == after
    assert torch.equal(model.weight, reference.weight)
    assert pipeline.statistics().batches_in_turn == 7


@BOTH
def test_the_code_around_the_pipeline_draws_as_in_a_plain_loop_too(make: Any) -> None:
    class Plain(Drawing):
        """Draws nothing."""

        def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
            output = (self.weight * batch).sum()
            return output.square(), output.detach()

    reference, model = Plain("torch"), Plain("torch")
    seed()
    expected = plain(reference, drawing_loader("torch", 8), between=lambda: draw("torch"))
    seed()
    pipeline = make(model, sgd(model), "cpu", lanes=lanes(EagerLane()))
    assert pipelined(pipeline, drawing_loader("torch", 8), between=lambda: draw("torch")) == expected


def order_of(model_source: str, loader: Iterator[Tensor], log: list[str]) -> str:
    model = Drawing(model_source, log)
    pipelined(TrainPipelineBase(model, sgd(model), "cpu", lanes=lanes(EagerLane())), loader)
    return " ".join(log)


def test_a_loader_that_does_not_draw_is_read_ahead() -> None:
    log: list[str] = []

    def loader() -> Iterator[Tensor]:
        for k in range(4):
            log.append("read")
            yield torch.full((3,), float(k))

    assert order_of("torch", loader(), log) == "read read read forward read forward forward forward"


def test_a_loader_and_a_model_with_generators_of_their_own_run_side_by_side_once_that_is_known() -> None:
    log: list[str] = []
    # One batch in turn tells what the model draws: nothing that the loader draws.
    expected = "read forward read read read forward read forward forward forward"
    assert order_of("torch", drawing_loader("numpy", 5, log), log) == expected


def test_a_loader_of_torch_that_draws_seeds_alone_is_read_ahead_behind_them() -> None:
    data = TensorDataset(torch.arange(24.0).reshape(8, 3))

    class Unpacked(Drawing):
        def forward(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
            return super().forward(batch[0])

    reference, model = Unpacked("torch"), Unpacked("torch")
    seed()
    expected = plain(reference, iter(DataLoader(data, shuffle=True)))
    seed()
    pipeline = TrainPipelineBase(model, sgd(model), "cpu", lanes=lanes(EagerLane()))
    assert pipelined(pipeline, iter(DataLoader(data, shuffle=True))) == expected
    assert pipeline.statistics().batches_in_turn == 1


def test_an_endless_loader_that_draws_seeds_again_and_again_is_read_in_turn() -> None:
    data = TensorDataset(torch.arange(9.0).reshape(3, 3))

    def endless(count: int) -> Iterator[Tensor]:
        while True:
            for (batch,) in DataLoader(data, shuffle=True):
                yield batch
                count -= 1
                if not count:
                    return

    reference, model = Drawing("torch"), Drawing("torch")
    seed()
    expected = plain(reference, endless(8))
    seed()
    pipeline = TrainPipelineBase(model, sgd(model), "cpu", lanes=lanes(EagerLane()))
    assert pipelined(pipeline, endless(8)) == expected


@pytest.mark.parametrize("speed", ["eager", "late", "thread"])
def test_a_model_that_draws_in_training_alone_is_watched_anew_when_its_mode_changes(lab: Any, speed: Any) -> None:
    load = {"eager": EagerLane, "late": lab.LateLane, "thread": lambda: None}[speed]()
    model = Drawing("torch").eval()
    pipeline = TrainPipelineBase(model, sgd(model), "cpu", lanes=load and lanes(load))
    loader = drawing_loader("torch", 12)
    seed()
    numbers = [draw("torch") for _ in range(24)]
    seed()
    seen = [float(pipeline.progress(loader)) / 3 for _ in range(4)]
    model.train()
    # Batches in flight were read ahead: with 2 ahead the loader has drawn 6 numbers, and the model now draws the next.
    trained = [float(pipeline.progress(loader)) for _ in range(8)]
    assert seen == pytest.approx(numbers[:4])
    weight, expected = 1.0, []
    draws = iter([*numbers[4:6], *numbers[6:]])
    batches, factors = [next(draws), next(draws)], []
    for k in range(8):
        if k >= 2:
            batches.append(next(draws))
        factors.append(next(draws))
        output = 3 * weight * batches[k] * factors[k]
        expected.append(output)
        weight -= 0.1 * 2 * output * batches[k] * factors[k]
    assert trained == pytest.approx(expected, rel=1e-4)


@BOTH
@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_nothing_ahead_a_batch_may_depend_on_what_became_of_the_one_before(make: Any, size: Any) -> None:
    outputs: list[Tensor] = []

    class Feedback:
        """Its next batch is the model's latest output."""

        reads = 0

        def __iter__(self) -> Feedback:
            return self

        def __next__(self) -> Tensor:
            assert len(outputs) == self.reads, "read before the output that the batch is made of"
            if self.reads == 7:
                raise StopIteration
            self.reads += 1
            return torch.full((3,), 0.5) if not outputs else 1 / (1 + outputs[-1].expand(3))

    class Plain(Drawing):
        def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
            output = (self.weight * batch).sum()
            return output.square(), output.detach()

    model = Plain("torch")
    ahead = dict.fromkeys(make.default_ahead, 0)
    pipeline, loader = make(model, sgd(model), "cpu", grad_accum=size, ahead=ahead), Feedback()
    while True:
        try:
            outputs.append(pipeline.progress(loader))
        except StopIteration:
            break
    reference = Plain("torch")
    optimizer, seen = sgd(reference), []
    for k in range(7):
        batch = torch.full((3,), 0.5) if not seen else 1 / (1 + seen[-1].expand(3))
        if k % size == 0:
            optimizer.zero_grad()
        losses, output = reference(batch)
        (losses / min(size, 7 - k // size * size)).backward()
        seen.append(output)
        if k % size == size - 1 or k == 6:
            optimizer.step()
    torch.testing.assert_close(torch.stack(outputs), torch.stack(seen))
    torch.testing.assert_close(model.weight, reference.weight)
    assert pipeline.statistics().steps == -(-7 // size)
