"""Models: a representation depends on its row alone, and arithmetic is counted as torch counts it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.models.contrastive import contrastive_loss
from benchmarks.models.dropout import row_keys
from benchmarks.models.encoder import build_encoder
from benchmarks.models.transformer import Stack
from benchmarks.retrieval import search


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


def test_representations_have_length_one_and_every_parameter_gets_a_gradient() -> None:
    model = encoder()
    representations = model(rows())
    torch.testing.assert_close(representations.norm(dim=1), torch.ones(7))
    contrastive_loss(representations, model(rows().flip(0))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


class Lookup(nn.Module):
    """Gives back the vectors that it was made with, by the number in column 1."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, rows: Tensor) -> Tensor:
        return self.vectors[rows[:, 1]]


def numbered(count: int) -> Tensor:
    return torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count)], dim=1)


def recall(model: nn.Module, descriptions: Tensor, sources: Tensor) -> float:
    return search(model, descriptions, sources)["recall"]


def test_recall_counts_the_rank_of_the_right_source() -> None:
    """Source k points along angle k; description k points along source k + 9, so that rank 10 is the worst."""
    angles = torch.arange(200) * 0.01
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    shifted = numbered(100)
    shifted[:, 1] += 60  # nearer: every source between k and k + 60, and beyond
    assert recall(Lookup(vectors), shifted, numbered(100)) == pytest.approx(0.1)  # the last ten have no nearer ones
    assert recall(Lookup(vectors), numbered(100), numbered(100)) == 1.0


def test_parameters_are_those_of_the_stack_that_is_built() -> None:
    stack = Stack(blocks=2, dim=64, rows=3, positions=5)
    assert sum(p.numel() for p in stack.build().parameters()) == stack.parameters
