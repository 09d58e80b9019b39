"""The ranking loss of sentence-transformers by its interface; against the package itself where it is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss, cos_sim


class Encoder(nn.Module):
    """Speaks as a SentenceTransformer does: features in, features with an embedding out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.dropout = nn.Embedding(20, 8), nn.Linear(8, 6), nn.Dropout(dropout)
        self.rows: list[int] = []

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        assert features.get("prompt_length") in (None, 3)
        self.rows.append(features["input_ids"].size(0))
        mask = features["attention_mask"][..., None]
        hidden = (self.table(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        return {**features, "sentence_embedding": self.out(self.dropout(hidden.tanh()))}


def features(rows: int, length: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(20, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "prompt_length": 3}


def whole_batch(model: nn.Module, columns: list[dict[str, Any]]) -> Tensor:
    reps = [model(column)["sentence_embedding"] for column in columns]
    scores = cos_sim(reps[0], torch.cat(reps[1:])) * 20.0
    return F.cross_entropy(scores, torch.arange(len(reps[0])))


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("size", [2, 5, 32])
def test_loss_and_gradients_are_the_whole_batch_s(columns: int, size: int, assert_same_gradients: Any) -> None:
    bare, ours = Encoder(), Encoder()
    batch = [features(7, 4 + k, k) for k in range(columns)]
    expected = whole_batch(bare, batch)
    (expected * 0.5).backward()
    loss = CachedMultipleNegativesRankingLoss(ours, mini_batch_size=size)(batch, torch.zeros(7))
    (loss * 0.5).backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients([bare], [ours])
    assert max(ours.rows) == min(size, 7)


def test_evaluation_and_configuration() -> None:
    model = Encoder()
    loss = CachedMultipleNegativesRankingLoss(model, 10.0, mini_batch_size=2, show_progress_bar=True)
    batch = [features(4, 3, 0), features(4, 3, 1)]
    with torch.no_grad():
        value = loss(batch)
    assert not value.requires_grad
    assert loss.get_config_dict() == {
        "scale": 10.0,
        "similarity_fct": "cos_sim",
        "mini_batch_size": 2,
        "gather_across_devices": False,
    }
    assert loss.model is model
    assert copy.deepcopy(loss)(batch).item() == pytest.approx(value.item())


def test_another_similarity_is_used_and_misuse_is_named() -> None:
    model = Encoder()
    batch = [features(4, 3, 0), features(4, 3, 1)]
    reps = [model(column)["sentence_embedding"] for column in batch]
    loss = CachedMultipleNegativesRankingLoss(model, 1.0, lambda a, b: a @ b.T, 2)(batch, None)
    torch.testing.assert_close(loss, F.cross_entropy(reps[0] @ reps[1].T, torch.arange(4)))
    with pytest.raises(ValueError, match="anchors and of positives"):
        CachedMultipleNegativesRankingLoss(model)(batch[:1])
    with pytest.raises(ValueError, match="cos_sim"):
        CachedMultipleNegativesRankingLoss(model, similarity_fct=torch.mm, gather_across_devices=True)


@pytest.mark.filterwarnings("ignore")
def test_value_and_gradients_are_those_of_the_package(assert_same_gradients: Any) -> None:
    package = pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason="needs the extra")
    transformer = pytest.importorskip("sentence_transformers").SentenceTransformer
    theirs, ours = (transformer(modules=[Encoder()], device="cpu") for _ in range(2))
    batch = [features(7, 4 + k, k) for k in range(3)]
    expected = package.CachedMultipleNegativesRankingLoss(theirs, mini_batch_size=3)(copy.deepcopy(batch), None)
    expected.backward()
    loss = CachedMultipleNegativesRankingLoss(ours, mini_batch_size=3)(batch, None)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients([theirs], [ours])
