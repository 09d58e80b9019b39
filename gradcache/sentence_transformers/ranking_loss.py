"""``CachedMultipleNegativesRankingLoss`` and its symmetric form: each anchor's positive among all documents.

====================  ==============================================================================================
direction             candidates of query i, with documents d_0 (positives), d_1, ... (hard negatives)
====================  ==============================================================================================
``query_to_doc``      every document of every query; its own positive is the right answer
``query_to_query``    every other query
``doc_to_query``      every query, seen from its own positive
``doc_to_doc``        every document of other queries, seen from its own positive
====================  ==============================================================================================

Source: Henderson et al., "Efficient Natural Language Response Suggestion for Smart Reply" (2017). Directions: Li et
al., "Towards General Text Embeddings with Multi-stage Contrastive Learning" (2023). Weights of hard negatives: Lan et
al. (2025), arXiv 2503.04812, equation 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.distributed.gather import RowsOfAll
from gradcache.loss import CHUNKED, chunked_cross_entropy
from gradcache.sentence_transformers.cached_loss import CachedLoss, cos_sim, name_of
from gradcache.tiled_loss import tiled, wide

__all__ = ["CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss"]

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITION_MODES = ("joint", "per_direction")
HARDNESS_MODES = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


class CachedMultipleNegativesRankingLoss(CachedLoss):
    """Ranks each anchor's positive among the documents of the whole batch, encoding ``mini_batch_size`` rows at a time.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included.
        scale: similarities are multiplied by it.
        similarity_fct: ``similarity_fct(a, b)`` returns (rows of a, rows of b).
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        gather_across_devices: use the candidates of all processes; no effect in a single process.
        directions: what each anchor and each positive is compared with, see above.
        partition_mode: ``"joint"``: one softmax over all directions; ``"per_direction"``: the mean of one for each.
        show_progress_bar: accepted for compatibility; this loss prints nothing.
        hardness_mode: the negatives whose weight grows with their similarity: ``"in_batch_negatives"``,
            ``"hard_negatives"``, ``"all_negatives"`` or None.
        hardness_strength: factor of this weight.

    Raises:
        ValueError: for invalid arguments.

    Source: Henderson et al., "Efficient Natural Language Response Suggestion" (2017); Gao et al. (2021) for the cache.
    """

    citation = """
@inproceedings{gao2021scaling,
    title = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
    author = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},
    booktitle = {Proceedings of the 6th Workshop on Representation Learning for NLP},
    year = {2021},
    url = {https://arxiv.org/abs/2101.06983}
}
"""
    _config = (
        *("scale", "similarity_fct", "mini_batch_size", "mini_batch_num_tokens", "gather_across_devices"),
        *("directions", "partition_mode", "hardness_mode", "hardness_strength"),
    )

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__(model, mini_batch_size, mini_batch_num_tokens, show_progress_bar)
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        if not {"query_to_doc"} <= set(self.directions) <= set(DIRECTIONS):
            raise ValueError(f"expected directions among {DIRECTIONS}, with 'query_to_doc', got {self.directions!r}")
        if partition_mode not in PARTITION_MODES:
            raise ValueError(f"expected partition_mode in {PARTITION_MODES}, got {partition_mode!r}")
        if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(self.directions):
            raise ValueError(
                f"expected directions that contain the positive pair with partition_mode='per_direction', got "
                f"{self.directions!r}; drop 'query_to_query' and 'doc_to_doc', or pass partition_mode='joint'"
            )
        if hardness_mode not in HARDNESS_MODES:
            raise ValueError(f"expected hardness_mode in {HARDNESS_MODES}, got {hardness_mode!r}")
        if hardness_strength < 0 or scale <= 0:
            raise ValueError(
                f"expected hardness_strength >= 0 and a positive scale, got {hardness_strength} and scale={scale}"
            )

    def _loss(self, columns: list[Tensor], context: Any) -> Tensor:
        """The mean over queries; over those of all processes, if they are gathered and there are several."""
        queries, positives = columns[:2]
        rows = RowsOfAll(columns, self.gather_across_devices)
        documents = torch.cat([rows.gathered(column) for column in columns[1:]])
        return rows.mean(*self._sum(queries, rows.own, positives, rows.gathered(queries), documents))

    def _sum(
        self, queries: Tensor, own: Tensor, positives: Tensor, every_query: Tensor, documents: Tensor
    ) -> tuple[Tensor, torch.dtype]:
        """The sum over queries, in at least 32 bits, and the dtype of the loss."""
        dtype, plain = queries.dtype, not self._weighs and set(self.directions) == {"query_to_doc"}
        if CHUNKED and self.similarity_fct is cos_sim and plain and len(queries):
            with torch.autocast(queries.device.type, enabled=False):
                x, y = (F.normalize(each.to(wide(each.dtype)), dim=1) for each in (queries, documents))
            total = chunked_cross_entropy(x, y, own, scale=self.scale, tile_rows=self.mini_batch_size)
            return total, total.dtype if torch.is_autocast_enabled(queries.device.type) else dtype

        def tile(*parts: Tensor) -> Tensor:
            nonlocal dtype
            losses = self._per_query(*parts)
            dtype = losses.dtype
            return losses.sum(dtype=wide(dtype))

        by_tiles = tiled(tile, tile_rows=self.mini_batch_size, cut=(1, 2), reduction="sum")
        return by_tiles(queries, own, positives, every_query, documents), dtype

    @property
    def _weighs(self) -> bool:
        return self.hardness_mode is not None and self.hardness_strength > 0

    def _per_query(
        self, queries: Tensor, own: Tensor, positives: Tensor, every_query: Tensor, documents: Tensor
    ) -> Tensor:
        """The loss of each query of a tile; ``own``: its number among all queries."""
        rows = torch.arange(len(queries), device=queries.device)
        # Columns of documents, one for each query, are concatenated.
        column = torch.arange(len(documents), device=own.device)[None, :]
        of_own, is_positive = column % len(every_query) == own[:, None], column < len(every_query)
        similar = self.similarity_fct(queries, documents)
        scores = {"query_to_doc": similar * self.scale}
        if self._weighs:
            weighted = {
                "in_batch_negatives": ~of_own,
                "hard_negatives": of_own & ~is_positive,
                "all_negatives": ~(of_own & is_positive),
            }[str(self.hardness_mode)]
            # Unscaled similarities, without a gradient.
            scores["query_to_doc"] = scores["query_to_doc"] + self.hardness_strength * similar.detach() * weighted
        if "query_to_query" in self.directions:
            among = self.similarity_fct(queries, every_query) * self.scale
            scores["query_to_query"] = among.index_put((rows, own), similar.new_tensor(-torch.inf))
        if "doc_to_query" in self.directions:
            scores["doc_to_query"] = self.similarity_fct(every_query, positives).T * self.scale
        if "doc_to_doc" in self.directions:
            among = self.similarity_fct(documents, positives).T * self.scale
            scores["doc_to_doc"] = among.masked_fill(of_own, -torch.inf)
        right = scores["query_to_doc"][rows, own]
        if self.partition_mode == "joint":
            return torch.cat([scores[name] for name in DIRECTIONS if name in scores], dim=1).logsumexp(1) - right
        return torch.stack([each.logsumexp(1) for each in scores.values()]).mean(0) - right

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for a model card."""
        return super().get_config_dict() | {"similarity_fct": name_of(self.similarity_fct)}

    @property
    def temperature(self) -> float:
        """The divisor of similarities."""
        return 1.0 / self.scale


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """Mean of the loss of each anchor's positive among all documents, and of each positive's anchor among all anchors.

    It is :class:`CachedMultipleNegativesRankingLoss` with ``directions=("query_to_doc", "doc_to_query")`` and
    ``partition_mode="per_direction"``, and the other arguments are the same.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            mini_batch_size,
            mini_batch_num_tokens,
            gather_across_devices,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
            show_progress_bar=show_progress_bar,
        )
