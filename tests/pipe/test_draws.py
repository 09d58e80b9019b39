"""One seed gives one result, whatever threads do: draws from shared generators have the order of a single device."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe, is_recomputing
from pipe.checkpoint import checkpoint
from pipe.recompute.generators import held_generators
from pipe.recompute.replay import Replay
from pipe.stream import CPUStream
from pipe.worker import Task, task_runner
from tests.pipe.test_worker import CPU, META

WIDTH = 4
DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To torch both are the CPU; a Pipe gives each a thread, as it would two GPUs."""
    for module in ("worker", "placement"):
        monkeypatch.setattr(f"pipe.{module}.normalize_device", torch.device)
    return DEVICES


class Draws(nn.Module):
    """Scales by numbers drawn on the host, several for each micro-batch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.linear(x) * self.draw()
        return x


SHARED = torch.Generator()
SOURCES: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(numpy.random.rand()),
    "generator of two layers": lambda: float(torch.rand((), generator=SHARED)),
}


def seed() -> None:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    SHARED.manual_seed(3)


def step(layers: nn.Sequential, devices: list[str], mode: str, schedule: str | None) -> list[Tensor]:
    """Output or loss, gradients, and what is drawn next."""
    pipe = Pipe(copy.deepcopy(layers), [1, 1], devices, chunks=8, checkpoint=mode)
    for layer in pipe:
        layer.shared = SHARED
    seed()
    x = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)
    for _ in range(2):  # the first mini-batch and one of which the draws are known
        if schedule is None:
            result = pipe(x)
            result.square().mean().backward()
        else:
            result = pipe.train_step(x, torch.zeros(16, WIDTH), nn.MSELoss(), schedule=schedule)
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    return [result.detach(), *gradients, torch.tensor(float(torch.rand(())))]


@pytest.mark.parametrize("schedule", [None, "1f1b", "fill_drain"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("source", SOURCES)
def test_stages_on_two_devices_draw_what_they_draw_on_one(
    source: str, mode: str, schedule: str | None, two_devices: list[str]
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Draws(SOURCES[source]), Draws(SOURCES[source]))
    expected = step(layers, ["cpu", "cpu"], mode, schedule)
    for _ in range(3):
        got = step(layers, two_devices, mode, schedule)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[-1], expected[-1])
        # Threads number their nodes by themselves, so sums over micro-batches may have another order.
        torch.testing.assert_close(got, expected)


class Meets(nn.Module):
    """Waits in the clocks in which both stages run until the other stage has begun."""

    def __init__(self, stage: int, barrier: threading.Barrier) -> None:
        super().__init__()
        self.stage = stage
        self.barrier = barrier
        self.weight = nn.Parameter(torch.ones(()))
        self.meeting = False

    def forward(self, x: Tensor) -> Tensor:
        alone = int(x.detach().flatten()[0]) == (0 if self.stage == 0 else 1)
        if self.meeting and not alone and not is_recomputing():
            self.barrier.wait(timeout=60)
        return x * self.weight.clamp(1, 1)


@pytest.mark.parametrize("drawn", [False, True])
def test_stages_run_at_the_same_time_unless_they_draw(drawn: bool, two_devices: list[str]) -> None:
    barrier = threading.Barrier(2)
    layers = nn.Sequential(Meets(0, barrier), Meets(1, barrier))
    pipe = Pipe(layers, [1, 1], two_devices, chunks=2, checkpoint="never")
    if drawn:
        handle = pipe[1].register_forward_hook(lambda *_: random.random() and None)
    x = torch.tensor([[0.0], [1.0]])
    pipe(x)  # shows whether they draw
    if drawn:
        handle.remove()
        order: list[tuple[int, str]] = []
        for j, layer in enumerate(pipe):
            layer.register_forward_pre_hook(lambda *_, j=j: order.append((j, "begins")))
            layer.register_forward_hook(lambda *_, j=j: order.append((j, "ends")))
        pipe(x)
        assert order == [(j, what) for j in (0, 0, 1, 1) for what in ("begins", "ends")]
    else:
        for layer in pipe:
            layer.meeting = True
        assert torch.equal(pipe(x), x)


def test_a_layer_that_begins_to_draw_later_is_a_warning_and_draws_in_order_from_then_on(
    two_devices: list[str],
) -> None:
    pipe = Pipe(nn.Sequential(*(Draws(lambda: 0.7) for _ in range(2))), [1, 1], two_devices, chunks=2)
    x = torch.randn(2, WIDTH)
    pipe(x)
    for layer in pipe:
        layer.draw = random.random
    with pytest.warns(RuntimeWarning, match=r"began to draw from generators that they share \(python\)"):
        pipe(x)
    seed()
    once = pipe(x)
    seed()
    assert torch.equal(pipe(x), once)


def test_a_pipe_that_was_evaluated_first_learns_anew_in_training(two_devices: list[str]) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)))
    pipe = Pipe(layers, [1, 1], two_devices, chunks=2)
    x = torch.randn(2, WIDTH)
    pipe.eval()(x)
    pipe.train()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe(x)
        pipe.train_step(x, x, nn.MSELoss())
    assert not given


def test_tasks_in_order_begin_when_the_one_before_has_ended() -> None:
    order: list[str] = []

    def task(stage: int, name: str) -> Task:
        def compute() -> Any:
            order.extend([f"{name} begins", f"{name} ends"])

        return Task(stage, compute, CPUStream)

    with task_runner([CPU, META], in_order=True) as run:
        run([task(1, "b"), task(0, "a"), task(1, "c")])
    assert order == [f"{name} {what}" for name in "bac" for what in ("begins", "ends")]


class OwnMask(nn.Module):
    """Drops rows by a generator of its own, kept in some way."""

    def __init__(self, keep: Callable[[nn.Module, Any], Any], generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = keep(self, generator)
        self.get = (lambda: generator) if self.kept is None else None
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept
        while isinstance(kept, (list, tuple, dict)):
            kept = kept["g"] if isinstance(kept, dict) else kept[0]
        return self.linear(x) * (0.5 + self.draw(kept))  # type: ignore[no-any-return]


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
    "python": (lambda: random.Random(1), lambda g: float(g.random())),
    "numpy": (lambda: numpy.random.default_rng(1), lambda g: float(g.random())),
    "numpy, old": (lambda: numpy.random.RandomState(1), lambda g: float(g.standard_normal())),
}
HOLDERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "attribute": lambda _, g: g,
    "list": lambda _, g: [g],
    "tuple": lambda _, g: (g, 3),
    "dict": lambda _, g: {"g": g},
}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_a_layer_draws_the_same_in_its_recomputation(
    kind: str, holder: str, schedule: str | None, mode: str
) -> None:
    make, draw = GENERATORS[kind]
    results = []
    for reference in (True, False):
        torch.manual_seed(0)
        generator = make()
        layers = nn.Sequential(OwnMask(HOLDERS[holder], generator, draw), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        x = torch.randn(4, WIDTH)
        if reference:
            output = torch.cat([layers(part) for part in x.split(2)])
            output.square().mean().backward()
        elif schedule is None:
            Pipe(layers, [1, 2], chunks=2, checkpoint=mode)(x).square().mean().backward()
        else:
            pipe = Pipe(layers, [1, 2], chunks=2, checkpoint=mode)
            pipe.train_step(x, torch.zeros(4, WIDTH), nn.MSELoss(), schedule=schedule)
        results.append(([p.grad for p in layers.parameters()], draw(generator)))
    (expected, following), (got, after) = results
    assert after == following
    for p, q in zip(got, expected, strict=True):
        torch.testing.assert_close(p, q)


def test_a_checkpointed_module_with_a_generator_of_its_own_repeats_it() -> None:
    generator = torch.Generator().manual_seed(0)
    seen: list[float] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generators = {"noise": generator}
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            seen.append(float(torch.rand((), generator=self.generators["noise"])))
            return x * self.weight * seen[-1]

    checkpoint(Layer(), torch.ones(2)).sum().backward()
    assert seen[0] == seen[1]


def test_each_generator_is_found_once_and_what_has_no_state_is_left_alone() -> None:
    layer = nn.Linear(1, 1)
    layer.first = layer.second = generator = torch.Generator()
    layer.system = random.SystemRandom()
    layer.pair = {"a": generator, "b": random.Random(0)}
    assert held_generators([layer, layer]) == [generator, layer.pair["b"]]


def test_a_rewound_replay_leaves_generators_as_they_were() -> None:
    generator = random.Random(1)
    replay = Replay.capture((), [generator])
    state = torch.get_rng_state()
    drawn = generator.random(), torch.rand(2)
    replay.take_back()
    assert torch.equal(torch.get_rng_state(), state)
    assert generator.random() == drawn[0]
