"""The ranking loss of sentence-transformers by its interface; against the package itself where it is installed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.sentence_transformers import CachedMultipleNegativesRankingLoss, cos_sim


class Notes:
    """What both passes note. A list that an object holds would be put back, so that it tells of one forward a chunk."""

    def __init__(self) -> None:
        made: list[Any] = []
        # Of functions, nothing is put back.
        self.append, self.made = lambda value: made.append(value), lambda: made


class Encoder(nn.Module):
    """Speaks as a SentenceTransformer does: features in, features with an embedding out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.dropout = nn.Embedding(20, 8), nn.Linear(8, 6), nn.Dropout(dropout)
        self.rows = Notes()

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
    loss = CachedMultipleNegativesRankingLoss(ours, mini_batch_size=size, gather_across_devices=columns == 3)(
        batch, torch.zeros(7)
    )
    (loss * 0.5).backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients([bare], [ours])
    assert max(ours.rows.made()) == min(size, 7)


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
        "mini_batch_num_tokens": None,
        "gather_across_devices": False,
        "directions": ("query_to_doc",),
        "partition_mode": "joint",
        "hardness_mode": None,
        "hardness_strength": 0.0,
    }
    assert loss.temperature == 0.1
    assert "Gao" in loss.citation
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
    for wrong, message in (
        ({"directions": ("doc_to_query",)}, "query_to_doc"),
        ({"directions": ("query_to_doc", "sideways")}, "sideways"),
        ({"partition_mode": "apart"}, "partition_mode"),
        ({"partition_mode": "per_direction", "directions": ("query_to_doc", "doc_to_doc")}, "positive pair"),
        ({"hardness_mode": "harder"}, "hardness_mode"),
        ({"hardness_mode": "all_negatives", "hardness_strength": -1.0}, "hardness_strength"),
        ({"mini_batch_num_tokens": 0}, "mini_batch_num_tokens"),
        ({"scale": 0.0}, "scale"),
    ):
        with pytest.raises(ValueError, match=message):
            CachedMultipleNegativesRankingLoss(model, **wrong)
    flat = {"input_ids": torch.zeros(9, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4, 9])}
    with pytest.raises(ValueError, match="pad instead of flattening"):
        CachedMultipleNegativesRankingLoss(model)([flat, flat])
    with pytest.raises(ValueError, match="attention_mask"):
        CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=8)([{"input_ids": flat["input_ids"]}] * 2)


class Widths(Encoder):
    """Notes the shape of what it encodes, and keeps what it computes in the dict that it got."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = Notes()
        self.keys: set[str] = set()

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        self.shapes.append(tuple(features["input_ids"].shape))
        self.keys |= features.keys()
        assert features["token_type_ids"].shape == features["input_ids"].shape
        features.update(super().forward(features))
        return features


def padded(lengths: list[int], left: int = 0) -> dict[str, Any]:
    width = max(lengths) + left
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) % 20
    column = torch.arange(width)[None, :]
    mask = ((column >= left) & (column < left + torch.tensor(lengths)[:, None])).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask * 0, "prompt_length": 3}


@pytest.mark.parametrize("tokens", [None, 8, 1])
def test_mini_batches_are_as_wide_as_their_longest_row_and_hold_so_many_tokens(
    tokens: int | None, assert_same_gradients: Any
) -> None:
    bare, ours = Widths(), Widths()
    batch = [padded([3, 2, 7, 1, 1]), padded([2, 2, 2, 2, 6], left=1)]
    expected = whole_batch(bare, copy.deepcopy(batch))
    expected.backward()
    loss = CachedMultipleNegativesRankingLoss(ours, mini_batch_size=2, mini_batch_num_tokens=tokens)(batch)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same_gradients([bare], [ours])
    shapes: dict[int | None, list[tuple[int, ...]]] = {
        None: [(2, 3), (2, 7), (1, 1), (2, 3), (2, 3), (1, 7)],
        8: [(2, 3), (2, 7), (1, 1), (4, 3), (1, 7)],
        1: [(1, 3), (1, 2), (1, 7), (1, 1), (1, 1), *[(1, 3)] * 4, (1, 7)],
    }
    assert ours.shapes.made() == shapes[tokens] * 2
    assert "sentence_embedding" not in ours.keys
    assert all("sentence_embedding" not in column for column in batch)


def test_a_wrapper_that_weighs_gradients_of_representations_alone_refuses_a_similarity_that_trains() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return cos_sim(a, b) * self.factor

    loss = CachedMultipleNegativesRankingLoss(Encoder(), similarity_fct=Learned())
    batch = [features(4, 3, 0), features(4, 3, 1)]
    loss(batch).backward()  # by itself it is trained
    assert loss.similarity_fct.factor.grad is not None  # type: ignore[attr-defined]
    loss.calculate_loss = loss.calculate_loss
    with pytest.raises(ValueError, match="without trainable parameters"):
        loss(batch)


def test_a_forward_restored_before_the_second_pass_is_refused() -> None:
    """As AdaptiveLayerLoss does around any loss: the second pass would run another model."""
    model = Encoder()
    loss = CachedMultipleNegativesRankingLoss(model)
    original = model.forward
    model.forward = lambda given: original(given)
    value = loss([features(4, 3, 0), features(4, 3, 1)])
    del model.forward
    with pytest.raises(RuntimeError, match="AdaptiveLayerLoss"):
        value.backward()
