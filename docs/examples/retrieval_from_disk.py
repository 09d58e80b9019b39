"""Trains a text retriever whose embedding table, encoder and batch may each be larger than memory.

    python docs/examples/retrieval_from_disk.py DIRECTORY

* The word table is stored in a file. While a batch computes, the rows of the next one are read
  (``OffloadEmbeddingBag``).
* The encoder and its optimizer's states are stored in files and loaded shard by shard (``OffloadModel``,
  ``OffloadOptimizer``).
* The contrastive batch is encoded in chunks (``GradCache``), and every query is compared with every passage.
* The loader is read ahead, and gradients are accumulated over windows of batches (``TrainPipelineSparseDist``).

A test checks that the result equals that of ``torch.nn.EmbeddingBag``, ``torch.nn.Sequential`` and a plain loop.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcache import GradCache
from offload import OffloadEmbeddingBag, OffloadModel, OffloadOptimizer, RowWiseAdagrad
from pipe.train import TrainPipelineSparseDist

WORDS, DIM, LAYERS = 500, 32, 3


@dataclass
class Pairs:
    """Queries and the passages that answer them: ``(rows, words)`` each."""

    queries: Tensor
    passages: Tensor


def encoder_layers(seed: int = 0) -> nn.Sequential:
    """The encoder above the word table, small enough to run anywhere."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU(), nn.Dropout(0.05)) for _ in range(LAYERS))
    )


def contrastive_losses(queries: Tensor, passages: Tensor) -> Tensor:
    """One loss for each query: its own passage against all passages of the batch."""
    scores = F.normalize(queries, dim=1) @ F.normalize(passages, dim=1).T
    return F.cross_entropy(scores * 8, torch.arange(len(queries), device=scores.device), reduction="none")


class Retriever(nn.Module):
    """Word table, encoder and loss; a train pipeline calls it with a batch."""

    def __init__(self, home: str | os.PathLike[str], chunk_rows: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = OffloadEmbeddingBag(WORDS, DIM, "mean", offload_device=home)
        self.encoder = OffloadModel(
            encoder_layers(), "cpu", offload_device=home, num_slices=2, checkpoint_activation=True
        )
        self._chunks = GradCache([self.encoder, self.encoder], chunk_rows, contrastive_losses)

    def forward(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The losses, and their mean for the log."""
        queries, passages = self._chunks.encode(self.words(pairs.queries), self.words(pairs.passages))
        losses = contrastive_losses(queries, passages)
        return losses.mean(), losses.detach().mean()


def pairs_of_words(batches: int, rows: int = 32, seed: int = 2) -> Iterator[Pairs]:
    """Passages of random words; a query repeats a few words of its passage."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        passages = torch.randint(WORDS, (rows, 12), generator=generator)
        yield Pairs(passages[:, :4].flip(1), passages)


def train(home: str | os.PathLike[str], batches: int = 60, grad_accum: int = 2) -> tuple[Retriever, list[float]]:
    """The model and the losses, batch by batch."""
    model = Retriever(home)
    optimizers = [
        RowWiseAdagrad(model.words.parameters(), lr=0.05),
        OffloadOptimizer(model.encoder, torch.optim.AdamW, lr=2e-3),
    ]
    pipeline = TrainPipelineSparseDist(model, optimizers, "cpu", grad_accum=grad_accum)
    loader, losses = pairs_of_words(batches), []
    while True:
        try:
            losses.append(float(pipeline.progress(loader)))
        except StopIteration:
            return model, losses


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/examples/retrieval_from_disk.py DIRECTORY")
    retriever, log = train(Path(sys.argv[1]))
    print(f"loss of the first five batches {sum(log[:5]) / 5:.3f}, of the last five {sum(log[-5:]) / 5:.3f}")
    print(retriever.words.statistics())
    print(retriever.encoder.statistics())
