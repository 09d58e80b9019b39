"""Towers around bodies, plain and offloaded, and what tests of both compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadModel
from tests.gradcache.towers import offloaded

WIDTH = 6
SHARDS = 3


def layers(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(SHARDS)]
    return nn.Sequential(*blocks).double()


class Tower(nn.Module):
    """What a tower may have around its bodies, trained and with random numbers and buffers; its forward uses some."""

    dropout = 0.0

    def __init__(self, dropout: float | None = None) -> None:
        super().__init__()
        self.dropout = self.dropout if dropout is None else dropout
        torch.manual_seed(7)
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH).double() for _ in range(3))
        self.norm_before, self.norm_after = (nn.BatchNorm1d(WIDTH).double() for _ in range(2))
        self.drop = nn.Dropout(self.dropout)
        self.body = layers(0, self.dropout)


class Normalised(Tower):
    """What enters the body is the chunk itself."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(self.body(x), dim=-1)


class Embedding(Tower):
    """With random numbers and buffers on both sides."""

    def prefix(self, x: Tensor) -> Tensor:
        return self.drop(self.norm_before(self.first(x)))

    def suffix(self, h: Tensor) -> Tensor:
        return self.last(self.drop(self.norm_after(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.suffix(self.body(self.prefix(x)))


class Residual(Tower):
    """What comes before the body is used behind it as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return x + self.body(x) * x


class TwoBodies(Tower):
    """One after the other, with something trained around each, and a way past the second."""

    def __init__(self) -> None:
        super().__init__()
        self.second = layers(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.first(x))
        return self.last(self.second(self.between(h).tanh()) + h)


def in_sequence() -> nn.Module:
    torch.manual_seed(10)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), layers(), nn.Linear(WIDTH, 3).double())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "normalised": Normalised,
    "embedding": Embedding,
    "residual": Residual,
    "two bodies": TwoBodies,
    "sequential": in_sequence,
}


def bodies(model: nn.Module) -> list[OffloadModel]:
    return [module for module in model.modules() if isinstance(module, OffloadModel)]


def with_offload(model: nn.Module, home: Any = "cpu", **options: Any) -> nn.Module:
    """A copy of a tower whose bodies are offloaded."""
    ours = copy.deepcopy(model)
    for name, child in list(ours.named_children()):
        if isinstance(child, nn.Sequential):
            place = f"{home}/{name}" if isinstance(home, Path) else home
            setattr(ours, name, offloaded(child, place, **{"num_slices": SHARDS, **options}))
    return ours


def loads(model: nn.Module) -> list[int]:
    return [body.statistics().shard_loads for body in bodies(model)]


def square(*representations: Tensor) -> Tensor:
    """A loss that ties all rows of all towers together."""
    joined = torch.cat(representations)
    return (joined @ joined.T).square().mean()


def rows(count: int, seed: int = 3) -> Tensor:
    return torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(expected: nn.Module, actual: nn.Module, tolerance: float = 1e-12) -> None:
    """Gradients and buffers of two towers, by name."""
    theirs, mine = ({n: p.grad for n, p in tower.named_parameters()} for tower in (expected, actual))
    # Some gradients cancel to zero, so what counts as a rounding error is a matter of the largest one.
    largest = max((float(gradient.abs().max()) for gradient in theirs.values() if gradient is not None), default=0.0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * max(largest, 1e-3), allow_subclasses=True)
    for name, buffer in actual.named_buffers():
        torch.testing.assert_close(buffer, dict(expected.named_buffers())[name], rtol=1e-12, atol=1e-12)


def layer_by_layer(tower: Embedding, chunks: Sequence[Tensor]) -> Tensor:
    """All chunks through the prefix, through each layer, through the suffix, in one graph."""
    values = [tower.prefix(chunk) for chunk in chunks]
    for layer in tower.body:
        values = [layer(value) for value in values]
    return torch.cat([tower.suffix(value) for value in values])
