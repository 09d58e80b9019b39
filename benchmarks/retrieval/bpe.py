"""A byte-level BPE of the corpus itself, trained once and kept in the user's cache.

It learns from the training side alone: the held-out texts have no part in the vocabulary. The cache is keyed by the
texts and by every setting that shapes the result, so a file under the right name is the right file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.frame.cache import cache_directory, write_once
from benchmarks.frame.extra import require
from benchmarks.retrieval.corpus import Corpus

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PADDING", "encode", "tokenizer_for"]

PADDING = 0  # the identifier of the padding token in every vocabulary trained here
LAYOUT = "words of a byte-level BPE, 1"  # change it with the training below: it is part of the key
SOURCE_CHARACTERS = 1_500  # of each function; the encoder reads less than this


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
    # The task is to find, not to write: case, white space and punctuation go, so that read_bytes, ReadBytes and
    # "Read bytes" become the same tokens and a short sequence holds most of a function.
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Replace(tokenizers.Regex(r"(?<=[a-z0-9])(?=[A-Z])"), " "),
            tokenizers.normalizers.Lowercase(),
        ]
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
