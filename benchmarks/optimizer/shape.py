"""What every way trains: the same blocks from one seed, the same batches, the same loss, the same hyperparameters.

Plain torch, so that a peer in an environment of its own can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.frame.work import block_flops
from benchmarks.retrieval.dropout import RowDropout, row_keys
from benchmarks.retrieval.encoder import Block, State

__all__ = ["Shape", "loss_of", "parameters_of_block"]


def parameters_of_block(dim: int) -> int:
    """Elements of one transformer block: four matrices, their biases, two norms."""
    return 12 * dim * dim + 13 * dim


@dataclass(frozen=True)
class Shape:
    """A stack of transformer blocks, and a batch of ``rows`` x ``positions`` tokens a step."""

    blocks: int = 8
    dim: int = 1024
    rows: int = 16
    positions: int = 128
    seed: int = 0
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    max_norm: float = 1.0
    graph_mebibytes: int = 512  #: what ours may keep in graphs, which need not be recomputed
    slots: int = 3  #: blocks that ours holds at once: one computes, one is updated, and one waits between the two

    def __post_init__(self) -> None:
        """Refuses what nobody could train, all of it at once."""
        wrong = [f"got {name}={getattr(self, name)}" for name in _POSITIVE if getattr(self, name) < 1]
        if self.dim % 64:
            wrong.append(f"expected a multiple of 64 channels, the size of a head, got dim={self.dim}")
        if wrong:
            raise ValueError("expected at least one of each; " + "; ".join(wrong))

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return self.blocks * parameters_of_block(self.dim)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.positions

    @property
    def flops(self) -> float:
        """Of the matrix products that a step cannot do without: a forward and a backward, nothing recomputed."""
        return 3 * self.blocks * block_flops(self.dim, self.tokens, self.positions)

    def block(self, k: int) -> Block:
        """Block ``k``, from a seed of its own: a model larger than memory is made block by block."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + k)
            dropouts = (RowDropout(0.1, 2 * k), RowDropout(0.1, 2 * k + 1))
            return Block(self.dim, dropouts, scale=(2 * self.blocks) ** -0.5)

    def model(self) -> list[nn.Module]:
        """All blocks."""
        return [self.block(k) for k in range(self.blocks)]

    def batch(self, step: int) -> tuple[State, Tensor]:
        """What enters the first block at ``step``, and what the last one should answer."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        size = (self.rows, self.positions, self.dim)
        hidden, target = (torch.randn(size, generator=generator) for _ in range(2))
        mask = torch.ones(self.rows, self.positions, dtype=torch.bool)
        return (hidden, mask, row_keys(self.seed, step, 0, self.rows)), target


_POSITIVE = ("blocks", "dim", "rows", "positions")


def loss_of(output: State, target: Tensor) -> Tensor:
    """Squared distance of each token, on average. Its gradient is far longer than 1, so that clipping always clips."""
    return (output[0] - target).square().sum(dim=-1).mean()
