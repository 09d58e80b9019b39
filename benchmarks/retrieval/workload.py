"""The texts as tensors: encoded once by the parent and read by every case, so that all of them see the same rows.

The tokenizer is a byte-level BPE of the corpus' training side, trained once and kept in the user's cache under a key of
the texts and of every setting that shapes it. Cases do not import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.extra import require
from benchmarks.harness.files import cache_directory, write_once
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import PADDING
from benchmarks.retrieval.corpus import Corpus, Pair
from benchmarks.retrieval.settings import DESCRIPTION_TOKENS, SOURCE_TOKENS, Settings

if TYPE_CHECKING:
    import numpy.typing as npt


SIDES = ("descriptions", "sources")
LAYOUT = "words of a byte-level BPE, 1"  # change it with the training below: it is part of the key
SOURCE_CHARACTERS = 1_500  # of each function: more than enough to fill the positions of a row


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
        for side, side_texts, length in zip(SIDES, texts, (DESCRIPTION_TOKENS, SOURCE_TOKENS), strict=True):
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
    tokenizers = require("tokenizers")
    key = hashlib.sha256(f"{LAYOUT} {tokenizers.__version__} {vocabulary} {corpus.fingerprint}".encode()).hexdigest()
    path = (directory or cache_directory()) / f"bpe-{vocabulary}-{key[:32]}.json"
    write_once(path, lambda temporary: _train(corpus, vocabulary).save(str(temporary)))
    return tokenizers.Tokenizer.from_file(str(path))


def encode(tokenizer: Any, texts: Sequence[str], length: int) -> npt.NDArray[np.int32]:
    """Token identifiers of the first ``length`` tokens of each text; shape (texts, length), padded at the end."""
    tokens = np.full((len(texts), length), PADDING, dtype=np.int32)
    for row, encoding in zip(tokens, tokenizer.encode_batch(list(texts)), strict=True):
        identifiers = encoding.ids[:length]
        row[: len(identifiers)] = identifiers
    return tokens


def _train(corpus: Corpus, vocabulary: int) -> Any:
    tokenizers = require("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    # Case, white space and punctuation are dropped, so that read_bytes, ReadBytes and "Read bytes" become the same
    # tokens and a short sequence holds most of a function.
    camel_case = tokenizers.Regex(r"(?<=[a-z0-9])(?=[A-Z])")
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Replace(camel_case, " "), tokenizers.normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\W_]+"), "removed"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus), trainer)
    return tokenizer


def _texts(corpus: Corpus) -> Iterator[str]:
    for pair in corpus.training:
        yield pair.description
        yield pair.source[:SOURCE_CHARACTERS]


class Batches:
    """Rows for an encoder: int64, the row's dropout key in column 0, then its tokens."""

    def __init__(self, path: Path, settings: Settings) -> None:
        with np.load(path) as arrays:
            self._training = [torch.from_numpy(arrays[f"training_{side}"]) for side in SIDES]
            self._held_out = [torch.from_numpy(arrays[f"held_out_{side}"]) for side in SIDES]
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        self._order = torch.randperm(len(self._training[0]), generator=generator)

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of one step's pairs; no pair is used twice before all were used once."""
        rows, seed = self._settings.batch, self._settings.seed
        chosen = self._order[torch.arange(step * rows, (step + 1) * rows) % len(self._order)]
        one, other = (_rows(side[chosen], row_keys(seed, step, k, rows)) for k, side in enumerate(self._training))
        return one, other

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Descriptions and sources of all held-out pairs; evaluation does not use their keys."""
        one, other = (_rows(side, torch.zeros(len(side), dtype=torch.int64)) for side in self._held_out)
        return one, other


def _rows(tokens: Tensor, keys: Tensor) -> Tensor:
    return torch.cat([keys[:, None], tokens.long()], dim=1)
