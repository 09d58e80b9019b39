"""The tokenizer: learned from the training side, cached whole, keyed by what it was learned from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.retrieval.corpus import Corpus, Pair
from benchmarks.retrieval.workload import tokenizer_for

TRAINING = Pair("m", "Read bytes from the open file.", "def read_bytes(openFile):\n    return openFile.read()")
HELD_OUT = Pair("n", "Quench the zygote.", "def quench(zygote): return zygote")
CORPUS = Corpus((TRAINING,) * 3, (HELD_OUT,), 2)


def test_the_held_out_side_has_no_part_in_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = tokenizer_for(CORPUS, 400, tmp_path).get_vocab()
    assert "bytes" in vocabulary
    assert not any(token in vocabulary for token in ("quench", "zygote", "zy"))


def test_a_tokenizer_is_trained_once_for_each_corpus_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenizer_for(CORPUS, 400, tmp_path)
    tokenizer_for(CORPUS, 300, tmp_path)
    tokenizer_for(Corpus(CORPUS.training[:1], CORPUS.held_out, 2), 400, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr("benchmarks.retrieval.workload._train", lambda *_: pytest.fail("trained again"))
    assert tokenizer_for(CORPUS, 400, tmp_path).get_vocab() == first.get_vocab()
