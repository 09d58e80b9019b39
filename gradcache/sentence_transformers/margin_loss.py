"""``MegaBatchMarginLoss``: each anchor's positive against the most similar positive of another anchor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.sentence_transformers.cached_loss import CachedLoss, columns_of, cos_sim, embedding_in
from gradcache.tiled_loss import tiled

__all__ = ["MegaBatchMarginLoss"]


class MegaBatchMarginLoss(CachedLoss):
    """Wants cosines above ``positive_margin`` for pairs, below ``negative_margin`` for the hardest negative of each.

    The hardest negative of an anchor is the most similar positive of another anchor of the batch.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included.
        positive_margin: cosines of pairs above it cost nothing.
        negative_margin: cosines of hardest negatives below it cost nothing.
        use_mini_batched_version: if False, each column is encoded as a whole, once.
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        show_progress_bar: accepted for compatibility; this loss prints nothing.

    Raises:
        ValueError: for invalid arguments.

    Source: Wieting and Gimpel, "ParaNMT-50M" (2018).
    """

    citation = """
@inproceedings{wieting2018paranmt,
    title = {{P}ara{NMT}-50{M}: Pushing the Limits of Paraphrastic Sentence Embeddings with Millions of Machine
        Translations},
    author = {Wieting, John and Gimpel, Kevin},
    booktitle = {Proceedings of ACL},
    year = {2018},
    pages = {451--462}
}
"""
    _config = ("positive_margin", "negative_margin", "mini_batch_size", "mini_batch_num_tokens")

    def __init__(
        self,
        model: nn.Module,
        positive_margin: float = 0.8,
        negative_margin: float = 0.3,
        use_mini_batched_version: bool = True,
        mini_batch_size: int = 50,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__(model, mini_batch_size, mini_batch_num_tokens, show_progress_bar)
        self.positive_margin = positive_margin
        self.negative_margin = negative_margin
        self.uses_gradient_cache = use_mini_batched_version

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; its ``backward()`` runs the second pass.

        Args:
            sentence_features: features of the anchors and of the positives.
            labels: not used.

        Raises:
            ValueError: unless there are two columns, with features that can be split by rows.
        """
        columns = columns_of(sentence_features)
        if len(columns) != 2:
            raise ValueError(
                f"expected features of anchors and of positives, got {len(columns)} columns; negatives are those of "
                f"the batch: use CachedMultipleNegativesRankingLoss for given ones"
            )
        if self.uses_gradient_cache:
            return super().forward(columns, labels)
        return self._loss([embedding_in(self.model(dict(features))) for features in columns], labels)

    def _loss(self, columns: list[Tensor], context: Any) -> Tensor:
        anchors, positives = columns
        rows = torch.arange(len(anchors), device=anchors.device)

        def tile(anchors: Tensor, own: Tensor, positives: Tensor) -> Tensor:
            cosines = cos_sim(anchors, positives)
            right = cosines.gather(1, own[:, None])[:, 0]
            hardest = cosines.scatter(1, own[:, None], -torch.inf).max(dim=1).values
            return (F.relu(self.positive_margin - right) + F.relu(hardest - self.negative_margin)).sum()

        total = tiled(tile, tile_rows=self.mini_batch_size, cut=(1,), reduction="sum")(anchors, rows, positives)
        return total / max(len(anchors), 1)
