"""One text encoder for both sides of a pair, as a plain ``nn.Sequential``.

    rows (int64, rows x (1 + positions))   column 0 is the row's key for dropout, the others are tokens
      Embedding  -> State
      Block      -> State      as often as the model is deep
      Head       -> representation            rows x channels, length 1

A representation depends on its row alone: not on the padding behind its tokens, nor on the other rows of its batch.
Chunks of a batch can therefore replace the batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.transformer import Block, State

PADDING = 0  #: the identifier of the padding token in every vocabulary


class Embedding(nn.Module):
    """Tokens and their positions to channels of about unit size.

    ``scale`` makes the blocks' contributions small beside the embeddings at the start: a fresh encoder already compares
    texts by the words that they share. No dropout: a mask that all positions share would drop the same channels of
    every word.
    """

    def __init__(self, vocabulary: int, positions: int, channels: int) -> None:
        super().__init__()
        self.scale = channels**0.5
        self.tokens = nn.Embedding(vocabulary, channels)
        self.positions = nn.Parameter(torch.empty(positions, channels))
        nn.init.normal_(self.tokens.weight, std=1 / self.scale)
        nn.init.normal_(self.positions, std=0.1 / self.scale)

    def forward(self, rows: Tensor) -> State:
        """``rows``: int64 of shape (rows, 1 + positions)."""
        keys, tokens = rows[:, 0], rows[:, 1:]
        hidden = (self.tokens(tokens) + self.positions[: tokens.size(1)]) * self.scale
        return hidden, tokens != PADDING, keys


class Head(nn.Module):
    """The mean over a row's tokens, projected, at length 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.projection = nn.Linear(channels, channels, bias=False)
        nn.init.eye_(self.projection.weight)  # the first representation is the mean itself

    def forward(self, state: State) -> Tensor:
        """Representations, float of shape (rows, channels)."""
        hidden, mask, _ = state
        weights = mask.to(hidden.dtype)
        total = torch.einsum("rpc,rp->rc", self.norm(hidden), weights)
        mean = total / weights.sum(dim=1, keepdim=True).clamp(min=1)
        return functional.normalize(self.projection(mean), dim=1)


def build_encoder(
    vocabulary: int, positions: int, *, dim: int, depth: int, dropout: float, seed: int = 0
) -> nn.Sequential:
    """An encoder with ``depth`` blocks of ``dim`` channels, a multiple of 64, its parameters drawn from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [Embedding(vocabulary, positions, dim)]
        layers += [Block(dim, dropout, k, scale=(2 * depth) ** -0.5) for k in range(depth)]
        return nn.Sequential(*layers, Head(dim))
