"""The transformer block of all benchmarks, and a stack of such blocks with its batches.

A block takes and returns a hidden tensor, as any layer of a plain ``nn.Sequential`` does; or, where rows differ in
length or have dropout, a :data:`State` whose mask and keys pass through unchanged.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.models.dropout import RowDropout, row_keys

HEAD_CHANNELS = 64

State: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Hidden (rows, positions, channels), mask (rows, positions) that is True on tokens, keys of the rows for dropout."""


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind its own norm and added to its input (pre-norm).

    Args:
        channels: a multiple of 64, the size of a head.
        dropout: probability; more than 0 needs a :data:`State`.
        index: of the block in its model, so that dropouts differ.
        scale: of the two projections onto the residual stream at the start (GPT-2's 1/sqrt(residual layers)).
    """

    def __init__(self, channels: int, dropout: float = 0.0, index: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        self.heads = channels // HEAD_CHANNELS
        self.attention_norm = nn.LayerNorm(channels)
        self.queries_keys_values = nn.Linear(channels, 3 * channels)
        self.attention_output = nn.Linear(channels, channels)
        self.perceptron_norm = nn.LayerNorm(channels)
        self.widen = nn.Linear(channels, 4 * channels)
        self.narrow = nn.Linear(4 * channels, channels)
        self.dropouts = nn.ModuleList(RowDropout(dropout, 2 * index + k) for k in range(2 if dropout else 0))
        if scale != 1.0:
            with torch.no_grad():
                self.attention_output.weight.mul_(scale)
                self.narrow.weight.mul_(scale)

    def forward(self, state: Any) -> Any:
        """A tensor to a tensor, or a :data:`State` to a :data:`State`."""
        hidden, mask, keys = state if isinstance(state, tuple) else (state, None, None)
        attention, perceptron = self.dropouts or (_undropped, _undropped)
        hidden = hidden + attention(self._attend(self.attention_norm(hidden), mask), keys)
        wide = functional.gelu(self.widen(self.perceptron_norm(hidden)))
        hidden = hidden + perceptron(self.narrow(wide), keys)
        return (hidden, mask, keys) if isinstance(state, tuple) else hidden

    def _attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        split = self.queries_keys_values(hidden).unflatten(2, (3, self.heads, HEAD_CHANNELS))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        shown = None if mask is None else mask[:, None, None, :]
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=shown)
        joined: Tensor = self.attention_output(attended.transpose(1, 2).flatten(2))
        return joined


def _undropped(hidden: Tensor, keys: Tensor | None) -> Tensor:
    return hidden


class Checkpoint(nn.Module):
    """A layer with ``torch.utils.checkpoint`` around it: the memory-saving method that PyTorch itself has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        """What the layer returns."""
        return checkpoint(self.layer, value, use_reentrant=False)


def checkpointed(layers: nn.Module) -> nn.Sequential:
    """Layers, one after the other, each with a checkpoint around it."""
    return nn.Sequential(*map(Checkpoint, layers.children()))


@dataclass(frozen=True)
class Stack:
    """``blocks`` transformer blocks of ``dim`` channels, and batches of ``rows`` x ``positions`` tokens.

    Without dropout blocks exchange plain tensors, which every peer can handle and every method may cut.
    """

    blocks: int
    dim: int
    rows: int
    positions: int
    dropout: float = 0.0
    seed: int = 0

    def block(self, k: int) -> Block:
        """Block ``k``, from a seed of its own: a model larger than memory is made block by block."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed * 1_000_003 + k)
            return Block(self.dim, self.dropout, k, scale=(2 * self.blocks) ** -0.5)

    def build(self) -> nn.Sequential:
        """Builds all blocks, the same for the same stack."""
        return nn.Sequential(*(self.block(k) for k in range(self.blocks)))

    def batch(self, step: int = 0) -> Any:
        """The input of the first block at ``step``: a tensor, or a :data:`State` where there is dropout."""
        hidden = self._normal(2 * step)
        if not self.dropout:
            return hidden
        return hidden, torch.ones(hidden.shape[:2], dtype=torch.bool), row_keys(self.seed, step, 0, self.rows)

    def target(self, step: int) -> Tensor:
        """What the last block should return at ``step``."""
        return self._normal(2 * step + 1)

    def _normal(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + seed)
        return torch.randn(self.rows, self.positions, self.dim, generator=generator)

    @property
    def tokens(self) -> int:
        """Tokens of one batch."""
        return self.rows * self.positions

    @property
    def parameters(self) -> int:
        """Elements of all blocks: four square matrices of attention, eight of the perceptron, biases and norms."""
        return self.blocks * (12 * self.dim**2 + 13 * self.dim)
