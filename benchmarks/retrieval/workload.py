"""Settings, and the texts as tensors: encoded once by the parent and read by every case, so that all see the same rows.

The tokenizer is a byte-level BPE of the corpus' training side, trained once and kept in the user's cache under a key of
the texts and of every setting that shapes it. Cases do not import it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.environment import cache_directory
from benchmarks.harness.settings import option
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import PADDING
from benchmarks.retrieval.corpus import Corpus, Pair

if TYPE_CHECKING:
    import numpy.typing as npt


OURS = "gradcache-offload"
METHODS = ("whole", "gradcache", OURS)
RANKS = int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
LENGTHS = (12, 28)  # tokens of a description and of a source
TEMPERATURE = 0.05
WEIGHT_DECAY = 0.01
WARMUP_STEPS = 4
PAIRS_SEEN = 480  # by default: larger batches take fewer steps
MINIMUM_STEPS = 2
SIDES = ("descriptions", "sources")
LAYOUT = "words of a byte-level BPE, 1"  # change it with the training below: it is part of the key
SOURCE_CHARACTERS = 1_500  # of each function: more than enough to fill the positions of a row


@dataclass(frozen=True)
class Settings:
    """The sizes of a run. Rows are pairs; every row is a description and a source."""

    dim: int = option(512, "channels of the encoder", multiple=64)
    depth: int = option(6, "transformer blocks")
    batch: int = option(48, "pairs in a batch", least=2)
    chunk: int = option(8, "rows in a GradCache chunk")
    steps: int | None = option(None, f"training steps; by default as many as see {PAIRS_SEEN} pairs", kind=int)
    seed: int = option(0, "of parameters, batches and dropout", least=0)
    memory: str = option("128MiB", "of the OffloadModel and its steps, in one process", kind=str)
    vocabulary: int = option(4096, "tokens of the BPE: one for each byte, and more", least=257)
    pairs: int = option(12_000, "of the corpus, training and held-out together")
    held_out: int = option(256, "held-out pairs to search, from modules that are not trained on")
    dropout: float = option(0.1, "probability", least=0)
    learning_rate: float = option(1e-4, "of AdamW, after the warm-up", least=0)
    loss_rows: int = option(512, "rows of the batch whose scores exist at a time, with GradCache")
    methods: tuple[str, ...] = option(METHODS, "which methods to run", choices=METHODS)
    capped_steps: int = option(2, "steps under the cap; 0: no such cases", least=0)
    ranks: int = option(RANKS, "processes that train one more case together, as many as torchrun starts; 1: no such")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: more ranks than rows."""
        if self.ranks > self.batch:
            return f"expected a row for each rank, got batch={self.batch} with ranks={self.ranks}"
        return ""

    @property
    def training_steps(self) -> int:
        """Training steps of each method."""
        return max(MINIMUM_STEPS, PAIRS_SEEN // self.batch) if self.steps is None else self.steps

    @property
    def tokens_per_step(self) -> int:
        """Positions that one step encodes, padding included."""
        return self.batch * sum(LENGTHS)

    def learning_rate_at(self, step: int) -> float:
        """Rises during the warm-up, then falls in a straight line to 5 % at the end."""
        rising = min(1.0, (step + 1) / WARMUP_STEPS)
        return self.learning_rate * rising * max(0.05, 1 - step / self.training_steps)


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
        for side, side_texts, length in zip(SIDES, texts, LENGTHS, strict=True):
            arrays[f"{split}_{side}"] = encode(tokenizer, side_texts, length)
    np.savez(path, allow_pickle=False, **arrays)
    return path


def tokenizer_for(corpus: Corpus, vocabulary: int, directory: Path | None = None) -> Any:
    """The ``tokenizers.Tokenizer`` of this corpus with at most ``vocabulary`` tokens, from the cache or trained now.

    Raises:
        ValueError: if ``vocabulary`` cannot hold the 256 bytes and the padding.
    """
    if vocabulary <= 256:
        raise ValueError(f"expected a vocabulary of more than 256 tokens, one for each byte, got {vocabulary=}")
    import tokenizers

    key = hashlib.sha256(f"{LAYOUT} {tokenizers.__version__} {vocabulary} {corpus.fingerprint}".encode()).hexdigest()
    path = (directory or cache_directory()) / f"bpe-{vocabulary}-{key[:32]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # whole or not at all
            _train(corpus, vocabulary).save(f"{folder}/{path.name}")
            os.replace(f"{folder}/{path.name}", path)
    return tokenizers.Tokenizer.from_file(str(path))


def encode(tokenizer: Any, texts: Sequence[str], length: int) -> npt.NDArray[np.int32]:
    """Token identifiers of the first ``length`` tokens of each text; shape (texts, length), padded at the end."""
    tokens = np.full((len(texts), length), PADDING, dtype=np.int32)
    for row, encoding in zip(tokens, tokenizer.encode_batch(list(texts)), strict=True):
        identifiers = encoding.ids[:length]
        row[: len(identifiers)] = identifiers
    return tokens


def _train(corpus: Corpus, vocabulary: int) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Case, white space and punctuation are dropped, so that read_bytes, ReadBytes and "Read bytes" become the same
    # tokens and a short sequence holds most of a function.
    camel_case = tokenizers.Regex(r"(?<=[a-z0-9])(?=[A-Z])")
    replaced, lower = tokenizers.normalizers.Replace(camel_case, " "), tokenizers.normalizers.Lowercase()
    tokenizer.normalizer = tokenizers.normalizers.Sequence([replaced, lower])
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\W_]+"), "removed")
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, letters])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for pair in corpus.training for text in (pair.description, pair.source[:SOURCE_CHARACTERS]))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Batches:
    """Rows for an encoder: int64, the row's dropout key in column 0, then its tokens."""

    def __init__(self, path: Path, settings: Settings) -> None:
        with np.load(path) as arrays:
            self._training = [torch.from_numpy(arrays[f"training_{side}"]) for side in SIDES]
            self._held_out = [torch.from_numpy(arrays[f"held_out_{side}"]) for side in SIDES]
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self._order = torch.randperm(len(self._training[0]), generator=generator)

    def training(self, step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of one step's pairs; no pair is used twice before all were used once.

        With ``Settings.ranks`` other than one: those of a ``rank``.
        """
        rows, seed = self._settings.batch, self._settings.seed
        chosen = self._order[torch.arange(step * rows, (step + 1) * rows) % len(self._order)]
        whole = [_rows(side[chosen], row_keys(seed, step, k, rows)) for k, side in enumerate(self._training)]
        one, other = (side.tensor_split(self._settings.ranks)[rank] for side in whole)
        return one, other

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of all held-out pairs; evaluation does not use their keys."""
        one, other = (_rows(side, torch.zeros(len(side), dtype=torch.int64)) for side in self._held_out)
        return one, other


def _rows(tokens: Tensor, keys: Tensor) -> Tensor:
    return torch.cat([keys[:, None], tokens.long()], dim=1)
