"""One encoder for both sides of a pair, as a plain ``nn.Sequential``.

A layer of a Sequential passes one value on, so everything that a later layer needs travels in it:

    rows (int64, rows x (1 + positions))   column 0 is the row's key for dropout, the others are tokens
      Embedding  -> (hidden, mask, keys)
      Block      -> (hidden, mask, keys)      as often as the model is deep
      Head       -> representation            rows x channels, length 1

The invariant: a representation depends on its row alone. Not on the padding behind its tokens, and not on the rows it
shares a batch with. That is what makes chunks of a batch exchangeable with the batch.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.retrieval.bpe import PADDING
from benchmarks.retrieval.dropout import RowDropout

__all__ = ["Block", "Embedding", "Head", "State", "build_encoder"]

HEAD_CHANNELS = 64

State: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What the layers hand on: hidden (rows, positions, channels), mask (rows, positions) that is True on tokens, keys."""


class Embedding(nn.Module):
    """Tokens and their positions to channels of about unit size.

    Unit size is the point of ``scale``: what the blocks add is small beside it at the start, so a fresh encoder
    already compares texts by the words they share, and a few dozen steps improve on that. No dropout here: a mask that
    all positions share would take the same channels from every word.
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


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind its own norm and added to what came in (pre-norm)."""

    def __init__(self, channels: int, dropouts: tuple[RowDropout, RowDropout], scale: float) -> None:
        super().__init__()
        self.heads = channels // HEAD_CHANNELS
        self.attention_norm = nn.LayerNorm(channels)
        self.queries_keys_values = nn.Linear(channels, 3 * channels)
        self.attention_output = nn.Linear(channels, channels)
        self.attention_dropout = dropouts[0]
        self.perceptron_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.perceptron_dropout = dropouts[1]
        with torch.no_grad():
            # The sum over a deep model must not drown what came in (GPT-2's 1/sqrt(residual layers)).
            self.attention_output.weight.mul_(scale)
            self.narrow.weight.mul_(scale)

    def forward(self, state: State) -> State:
        """One :data:`State` to the next: mask and keys unchanged."""
        hidden, mask, keys = state
        hidden = hidden + self.attention_dropout(self._attend(self.attention_norm(hidden), mask), keys)
        wide = functional.gelu(self.widen(self.perceptron_norm(hidden)))
        return hidden + self.perceptron_dropout(self.narrow(wide), keys), mask, keys

    def _attend(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, positions, channels = hidden.shape
        split = self.queries_keys_values(hidden).view(rows, positions, 3, self.heads, HEAD_CHANNELS)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None, None, :])
        joined: Tensor = self.attention_output(attended.transpose(1, 2).reshape(rows, positions, channels))
        return joined


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


def build_encoder(vocabulary: int, positions: int, *, dim: int, depth: int, dropout: float, seed: int) -> nn.Sequential:
    """An encoder with ``depth`` blocks of ``dim`` channels, its parameters drawn from ``seed``.

    Raises:
        ValueError: if ``dim`` is not a multiple of 64, the size of a head.
    """
    if dim < HEAD_CHANNELS or dim % HEAD_CHANNELS:
        raise ValueError(f"expected a multiple of {HEAD_CHANNELS} channels, the size of a head, got {dim=}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [Embedding(vocabulary, positions, dim)]
        for k in range(depth):
            dropouts = (RowDropout(dropout, 2 * k), RowDropout(dropout, 2 * k + 1))
            layers.append(Block(dim, dropouts, scale=(2 * depth) ** -0.5))
        return nn.Sequential(*layers, Head(dim))
