"""Layers and models that hit what is hard: randomness, buffers, in-place writes, nested values, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipe.microbatch import gather_nested, split_nested

WIDTH = 8


class Fork(nn.Module):
    """x -> nested values: an integer, None, a string and a constant without gradient, before those that need one."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        rows = torch.arange(x.size(0))
        return {"rows": rows, "constant": torch.ones(x.size(0), 1), "pair": (x * 2, [x.sin(), None]), "name": "fork"}


class Merge(nn.Module):
    def forward(self, value: dict[str, Any]) -> Tensor:
        a, (b, nothing) = value["pair"]
        assert nothing is None
        assert value["name"] == "fork"
        return a + b * value["constant"] + value["rows"].unsqueeze(1) * 0.01


class Complex(nn.Module):
    """Real -> complex -> real, with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs()


class ToComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x.cos())


class FromComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x).sum(-1)


class Unused(nn.Module):
    """Has a parameter that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Counting(nn.Module):
    """Counts its rows in a buffer that it writes in place, and replaces another buffer by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.rows += x.size(0)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * (1 + self.mean.abs())


class Clipped(nn.Module):
    """Writes its own weight in place before using it, as an embedding with max_norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x @ self.weight


class Noise(nn.Module):
    """Draws from Python's and NumPy's generators too."""

    def forward(self, x: Tensor) -> Tensor:
        import random

        import numpy as np

        return x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand()) * torch.rand_like(x)


def frozen() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return layer


LAYERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "dropout": lambda: [nn.Dropout(0.4)],
    "inplace": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "inplace_dropout": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3, inplace=True)],
    "batchnorm": lambda: [nn.BatchNorm1d(WIDTH)],
    "spectral": lambda: [nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))],
    "nested": lambda: [Fork(), Merge()],
    "complex": lambda: [Complex()],
    "complex_boundary": lambda: [ToComplex(), FromComplex()],
    "unused": lambda: [Unused()],
    "frozen": lambda: [frozen()],
    "counting": lambda: [Counting()],
    "clipped": lambda: [Clipped()],
    "noise": lambda: [Noise()],
    "identity": lambda: [nn.Identity()],
    "rnn": lambda: [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()],
}


def build(kinds: Sequence[str], *, tied: bool = False, seed: int = 0) -> nn.Sequential:
    """A model of these kinds of layers between two linear ones, whose weight is one parameter if ``tied``."""
    torch.manual_seed(seed)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if tied:
        last.weight = first.weight
    return nn.Sequential(first, *(layer for kind in kinds for layer in LAYERS[kind]()), last)


def reference(bare: nn.Sequential, cuts: Sequence[int], x: Any, microbatches: int) -> Any:
    """What an OffloadModel of the same shards must equal: all micro-batches pass one shard, then the next."""
    values = split_nested(x, microbatches)
    layers = list(bare)
    for begin, end in pairwise([0, *accumulate(cuts)]):
        for i, value in enumerate(values):
            for layer in layers[begin:end]:
                value = layer(value)
            values[i] = value
    return gather_nested(values)
