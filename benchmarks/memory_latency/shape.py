"""The model that every way runs: a plain ``nn.Sequential`` of transformer blocks, and how much arithmetic it is.

No peer needs to know anything of it: one tensor enters a block and one of the same shape leaves it. There is no
dropout, so that ways which cut the batch draw nothing that others do not, and gradients can be compared.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.frame.arguments import at_least
from benchmarks.frame.work import block_flops

__all__ = ["Block", "Shape", "add_shape_arguments", "shape_of"]


class Block(nn.Module):
    """Attention over all positions and a two-layer perceptron, each behind its own norm and added to what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // 64
        self.attention_norm = nn.LayerNorm(channels)
        self.queries_keys_values = nn.Linear(channels, 3 * channels)
        self.attention_output = nn.Linear(channels, channels)
        self.perceptron_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``: (rows, positions, channels), in and out."""
        split = self.queries_keys_values(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        hidden = hidden + self.attention_output(attended.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.widen(self.perceptron_norm(hidden)))
        narrow: Tensor = self.narrow(wide)
        return hidden + narrow


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    layers: int
    dim: int
    rows: int
    positions: int
    seed: int = 0

    def build(self) -> nn.Sequential:
        """The model on the CPU, the same for the same shape."""
        torch.manual_seed(self.seed)
        return nn.Sequential(*(Block(self.dim) for _ in range(self.layers)))

    def batch(self) -> Tensor:
        """What enters the first block: (rows, positions, channels)."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rows, self.positions, self.dim, generator=generator)

    @property
    def parameters(self) -> int:
        """Numbers in all blocks: four square matrices of attention, eight of the perceptron, biases and norms."""
        return self.layers * (12 * self.dim**2 + 13 * self.dim)

    @property
    def forward_flops(self) -> float:
        """Of the matrix products of a forward."""
        return self.layers * block_flops(self.dim, self.rows * self.positions, self.positions)

    @property
    def training_flops(self) -> float:
        """Of a forward and a backward, nothing recomputed: as many as three forwards.

        The batch needs no gradient, but the norm in front of the first product does.
        """
        return 3 * self.forward_flops


def add_shape_arguments(parser: argparse.ArgumentParser, *, layers: int, dim: int, rows: int, positions: int) -> None:
    """The sizes of a :class:`Shape`, with these defaults."""
    parser.add_argument("--layers", type=int, default=layers, metavar="N", help="transformer blocks")
    parser.add_argument("--dim", type=int, default=dim, metavar="N", help="channels, a multiple of 64")
    parser.add_argument("--rows", type=int, default=rows, metavar="N", help="rows of the batch")
    parser.add_argument("--positions", type=int, default=positions, metavar="N", help="tokens of a row")


def shape_of(arguments: argparse.Namespace, **least: int) -> Shape:
    """The shape that was asked for.

    Raises:
        ValueError: if no model has these sizes; ``least`` says how large some must be, the others at least 1.
    """
    at_least(arguments, **{"layers": 1, "rows": 1, "positions": 1} | least)
    if arguments.dim < 64 or arguments.dim % 64:
        raise ValueError(f"expected a multiple of 64 channels, got dim={arguments.dim}")
    return Shape(arguments.layers, arguments.dim, arguments.rows, arguments.positions)
