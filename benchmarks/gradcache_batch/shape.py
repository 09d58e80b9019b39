"""What all ways have in common: the encoder, the batch, and how finely it is cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.retrieval.dropout import row_keys
from benchmarks.retrieval.encoder import build_encoder

__all__ = ["TEMPERATURE", "Shape"]

TEMPERATURE = 0.05
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Shape:
    """An encoder, pairs of texts, and chunks. A pair is two rows, one for each tower; the towers are one encoder."""

    vocabulary: int
    positions: int  #: tokens of a row
    dim: int
    depth: int
    pairs: int
    chunk: int  #: rows of a chunk
    kept_mebibytes: int  #: what may be kept between its passes
    graph_mebibytes: int  #: what kept graphs may take over an OffloadModel
    activation_mebibytes: int  #: what a cell of chunks that run together may take there
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
        """Tokens of a step."""
        return 2 * self.pairs * self.positions
