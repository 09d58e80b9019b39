"""One seed gives one result: draws from generators have the order of a single device, and repeat in recomputations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipe import Pipe

WIDTH = 4
DEVICES = ["cpu:0", "cpu:1"]


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To torch both are the CPU; a Pipe takes them for two."""
    monkeypatch.setattr("pipe.placement.normalize_device", torch.device)
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
def test_two_devices_draw_what_one_draws(source: str, mode: str, schedule: str | None, two_devices: list[str]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Draws(SOURCES[source]), Draws(SOURCES[source]))
    expected = step(layers, ["cpu", "cpu"], mode, schedule)
    for _ in range(3):
        got = step(layers, two_devices, mode, schedule)
        assert all(map(torch.equal, got, expected))


class OwnMask(nn.Module):
    """Drops rows by a generator of its own, kept in some way."""

    def __init__(self, keep: Callable[[nn.Module, Any], Any], generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = keep(self, generator)
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
def test_a_layer_s_generator_draws_the_same_recomputed(kind: str, holder: str, schedule: str | None, mode: str) -> None:
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
    torch.testing.assert_close(*results)
