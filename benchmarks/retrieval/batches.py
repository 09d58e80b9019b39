"""The texts as tensors: encoded once by the parent, read by every rung, so that all of them see the same rows.

The rungs do not import the tokenizer: their processes hold the model and what trains it, and nothing else that would
count as their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.retrieval.bpe import encode, tokenizer_for
from benchmarks.retrieval.corpus import Corpus, Pair
from benchmarks.retrieval.dropout import row_keys
from benchmarks.retrieval.settings import Settings

__all__ = ["Batches", "write_tokens"]

SIDES = ("descriptions", "sources")
SOURCE_CHARACTERS = 1_500  # more than enough to fill the positions of a row


def write_tokens(corpus: Corpus, settings: Settings, path: Path, cache: Path | None = None) -> Path:
    """Encodes both sides of the corpus into one ``.npz`` file.

    Raises:
        ValueError: if there are fewer training pairs than rows in a batch.
    """
    if len(corpus.training) < settings.batch:
        raise ValueError(
            f"expected at least batch={settings.batch} training pairs, got {len(corpus.training)}; use a smaller batch"
        )
    tokenizer = tokenizer_for(corpus, settings.vocabulary, cache)
    # Spread over the modules: the first ones of a corpus would be few modules with many pairs each.
    spread = np.linspace(0, len(corpus.held_out) - 1, min(settings.held_out, len(corpus.held_out))).astype(int)
    chosen: dict[str, Sequence[Pair]] = {"training": corpus.training, "held_out": [corpus.held_out[k] for k in spread]}
    arrays = {}
    for split, pairs in chosen.items():
        texts = ([pair.description for pair in pairs], [pair.source[:SOURCE_CHARACTERS] for pair in pairs])
        lengths = (settings.description_tokens, settings.source_tokens)
        for side, side_texts, length in zip(SIDES, texts, lengths, strict=True):
            arrays[f"{split}_{side}"] = encode(tokenizer, side_texts, length)
    np.savez(path, allow_pickle=False, **arrays)
    return path


class Batches:
    """Rows for an encoder: int64, the row's dropout key in column 0, its tokens behind."""

    def __init__(self, path: Path, settings: Settings) -> None:
        with np.load(path) as arrays:
            self._training = [torch.from_numpy(arrays[f"training_{side}"]) for side in SIDES]
            self._held_out = [torch.from_numpy(arrays[f"held_out_{side}"]) for side in SIDES]
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self._order = torch.randperm(len(self._training[0]), generator=generator)

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of one step's pairs; no pair comes twice before all have come once."""
        rows = self._settings.batch
        chosen = self._order[torch.arange(step * rows, (step + 1) * rows) % len(self._order)]
        seed = self._settings.seed
        descriptions, sources = (
            _rows(side[chosen], row_keys(seed, step, tower, rows)) for tower, side in enumerate(self._training)
        )
        return descriptions, sources

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of all held-out pairs; their keys are not used in evaluation."""
        descriptions, sources = (_rows(side, torch.zeros(len(side), dtype=torch.int64)) for side in self._held_out)
        return descriptions, sources


def _rows(tokens: Tensor, keys: Tensor) -> Tensor:
    return torch.cat([keys[:, None], tokens.long()], dim=1)
