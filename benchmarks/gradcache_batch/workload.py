"""What all methods have in common: the encoder, the batch, and its chunks."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.limits import block_flops
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder

TEMPERATURE = 0.05
FLOOR = "interpreter and torch"


@dataclass(frozen=True)
class Shape:
    """An encoder, pairs of texts, and chunks. A pair is two rows, one for each tower; the towers are one encoder."""

    vocabulary: int
    positions: int  #: tokens of a row
    dim: int
    depth: int
    pairs: int
    chunk: int  #: rows of a chunk
    kept: int  #: MiB that ours may keep between its passes, layers in memory
    graphs: int  #: MiB of graphs that ours may keep over an OffloadModel
    together: int  #: MiB of activations of chunks that run together there
    dropout: float = 0.1
    seed: int = 0

    def build(self) -> nn.Sequential:
        """The encoder, the same for the same shape."""
        return build_encoder(
            self.vocabulary, self.positions, dim=self.dim, depth=self.depth, dropout=self.dropout, seed=self.seed
        )

    def batch(self, pairs: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of both towers, int64 of shape (pairs, 1 + positions): the row's key for dropout, then its tokens."""
        count = self.pairs if pairs is None else pairs
        generator = torch.Generator().manual_seed(self.seed)

        def side(tower: int) -> Tensor:
            tokens = torch.randint(2, self.vocabulary, (count, self.positions), generator=generator)
            return torch.cat([row_keys(self.seed, 0, tower, count)[:, None], tokens], dim=1)

        return side(0), side(1)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return 2 * self.pairs * self.positions

    @property
    def training_flops(self) -> float:
        """Of the blocks' matrix products in a forward and a backward, nothing recomputed."""
        return 3 * self.depth * block_flops(self.dim, self.tokens, self.positions)
