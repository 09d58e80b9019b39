"""Layers and models that hit what is hard: randomness, buffers, in-place writes, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

WIDTH = 8


class Unused(nn.Module):
    """Has a parameter that it never uses."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Attention(nn.Module):
    """The other half."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """Half of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(nn.functional.gelu(self.widen(self.norm(x))))
        return x + y


class OwnForward(nn.Module):
    """Calls its ``layers`` in a forward of its own."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Noise(nn.Module):
    """Draws from Python's and NumPy's generators too."""

    def forward(self, x: Tensor) -> Tensor:
        import random

        import numpy as np

        return x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand()) * torch.rand_like(x)


LAYERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "dropout": lambda: [nn.Dropout(0.4)],
    "inplace": lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    "inplace_dropout": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3, inplace=True)],
    "batchnorm": lambda: [nn.BatchNorm1d(WIDTH)],
    "unused": lambda: [Unused()],
    "noise": lambda: [Noise()],
    "rnn": lambda: [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()],
}


def build(kinds: Sequence[str], *, tied: bool = False, seed: int = 0) -> nn.Sequential:
    """A model of these kinds of layers between two linear ones, whose weight is one parameter if ``tied``."""
    torch.manual_seed(seed)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    if tied:
        last.weight = first.weight
    return nn.Sequential(first, *(layer for kind in kinds for layer in LAYERS[kind]()), last)
