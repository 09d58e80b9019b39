"""Models and texts: a representation depends on its row alone, and no text is trained on and searched."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.models.corpus import build_corpus
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder

PARTS = ("module", "description", "source")


def encoder(dropout: float = 0.3, seed: int = 0) -> nn.Sequential:
    return build_encoder(100, 12, dim=64, depth=2, dropout=dropout, seed=seed)


def rows(count: int = 7, length: int = 12) -> Tensor:
    tokens = torch.randint(1, 100, (count, length), generator=torch.Generator().manual_seed(1))
    for k in range(count):
        tokens[k, k + 2 :] = 0  # rows of different lengths
    return torch.cat([row_keys(0, 3, 0, count)[:, None], tokens], dim=1)


def test_padding_does_not_change_a_representation() -> None:
    model, padded = encoder(), rows()
    whole = model(padded)
    for k, row in enumerate(padded):
        alone = model(row[None, : 1 + k + 2])  # the row without its padding
        torch.testing.assert_close(alone[0], whole[k], rtol=0, atol=2e-6)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=7), st.permutations(range(7)))
def test_dropout_does_not_depend_on_how_the_batch_is_cut_or_ordered(sizes: list[int], order: list[int]) -> None:
    model, batch = encoder(), rows()
    whole = model(batch)
    cuts = [size for size in torch.tensor(sizes).cumsum(0).tolist() if size < 7]
    pieces = torch.cat([model(piece) for piece in batch[order].tensor_split(cuts)])
    torch.testing.assert_close(pieces, whole[order], rtol=0, atol=2e-6)


def test_no_module_and_no_text_of_the_corpus_is_on_both_sides(tmp_path: Path) -> None:
    """Each text occurs twice, in modules of other names."""
    for k in range(60):
        for name in (f"module{k}", f"copy{k}"):
            text = f'def work{k}(x):\n    """Compute the value number {k} from its input."""\n    return x + {k}\n'
            (tmp_path / f"{name}.py").write_text(text)
    corpus = build_corpus([tmp_path])
    assert len(corpus.training) + len(corpus.held_out) == 60
    sides = [[{getattr(pair, part) for pair in side} for side in (corpus.training, corpus.held_out)] for part in PARTS]
    assert all(one.isdisjoint(other) for one, other in sides)
    assert not any("Compute" in pair.source for pair in corpus.training)
