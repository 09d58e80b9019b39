"""The tokenizer: learned from the training side, cached whole, keyed by what it was learned from."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frame.cache import cache_directory, write_once, write_whole
from benchmarks.retrieval.bpe import PADDING, encode, tokenizer_for
from benchmarks.retrieval.corpus import Corpus, Pair

TRAINING = Pair("m", "Read bytes from the open file.", "def read_bytes(openFile):\n    return openFile.read()")
HELD_OUT = Pair("n", "Quench the zygote.", "def quench(zygote): return zygote")
CORPUS = Corpus((TRAINING,) * 3, (HELD_OUT,), 2)


def test_case_underscores_and_punctuation_do_not_separate_a_name_from_its_words(tmp_path: Path) -> None:
    tokenizer = tokenizer_for(CORPUS, 400, tmp_path)
    rows = encode(tokenizer, ["read_bytes(openFile)", "ReadBytes, open file", "Read bytes: open File."], 8)
    assert (rows[0] == rows[1]).all()
    assert (rows[0] == rows[2]).all()


def test_the_held_out_side_has_no_part_in_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = tokenizer_for(CORPUS, 400, tmp_path).get_vocab()
    assert "bytes" in vocabulary
    assert not any(token in vocabulary for token in ("quench", "zygote", "zy"))


def test_texts_are_cut_and_padded_to_the_length(tmp_path: Path) -> None:
    rows = encode(tokenizer_for(CORPUS, 400, tmp_path), ["file", "file file file file"], 3)
    assert rows.shape == (2, 3)
    assert rows[0, 0] != PADDING
    assert (rows[0, 1:] == PADDING).all()
    assert (rows[1] == rows[0, 0]).all()


def test_the_second_time_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenizer_for(CORPUS, 400, tmp_path)
    monkeypatch.setattr("benchmarks.retrieval.bpe._train", lambda *_: pytest.fail("trained again"))
    assert tokenizer_for(CORPUS, 400, tmp_path).get_vocab() == first.get_vocab()
    assert len(list(tmp_path.iterdir())) == 1


def test_another_corpus_or_size_is_another_file(tmp_path: Path) -> None:
    tokenizer_for(CORPUS, 400, tmp_path)
    tokenizer_for(CORPUS, 300, tmp_path)
    tokenizer_for(Corpus(CORPUS.training[:1], CORPUS.held_out, 2), 400, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than 256 tokens"):
        tokenizer_for(CORPUS, 256, tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "cache" / "file", interrupted)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_write_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "file", lambda temporary: temporary.write_text("whole"))
    with pytest.raises(FileNotFoundError):
        write_whole(path, lambda temporary: (temporary.parent / "missing").read_text())
    assert path.read_text() == "whole"
    assert write_once(path, lambda temporary: pytest.fail("written again")) == path


def test_the_cache_follows_xdg_and_ignores_a_relative_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "gradstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory().is_absolute()
