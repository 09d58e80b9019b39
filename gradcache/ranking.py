"""Multiple negatives ranking loss: cross entropy of each query against documents and queries, in tiles of queries.

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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from gradcache.distributed.gather import gather_rows, rows_per_rank
from gradcache.loss import CHUNKED, chunked_cross_entropy, over_processes
from gradcache.tiled_loss import tiled, wide

__all__ = ["DIRECTIONS", "HARDNESS_MODES", "PARTITION_MODES", "Ranking"]

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITION_MODES = ("joint", "per_direction")
HARDNESS_MODES = (None, "in_batch_negatives", "hard_negatives", "all_negatives")


@dataclass(frozen=True)
class Ranking:
    """The loss, as a function of queries and columns of documents.

    Raises:
        ValueError: for an unknown direction or mode, or incompatible modes.
    """

    similarity_fct: Callable[[Tensor, Tensor], Tensor]
    scale: float
    directions: tuple[str, ...]
    partition_mode: str
    hardness_mode: str | None
    hardness_strength: float
    tile_rows: int
    gather: bool
    #: Whether ``similarity_fct`` is the cosine, of which torch computes a plain loss in chunks.
    cosine: bool = False

    def __post_init__(self) -> None:
        if not {"query_to_doc"} <= set(self.directions) <= set(DIRECTIONS):
            raise ValueError(
                f"expected directions among {DIRECTIONS}, 'query_to_doc' with its positives among them, got "
                f"{self.directions!r}"
            )
        if self.partition_mode not in PARTITION_MODES:
            raise ValueError(f"expected partition_mode in {PARTITION_MODES}, got {self.partition_mode!r}")
        if self.partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(self.directions):
            raise ValueError(
                f"expected directions that contain the positive pair with partition_mode='per_direction', got "
                f"{self.directions!r}; drop 'query_to_query' and 'doc_to_doc', or pass partition_mode='joint'"
            )
        if self.hardness_mode not in HARDNESS_MODES:
            raise ValueError(f"expected hardness_mode in {HARDNESS_MODES}, got {self.hardness_mode!r}")
        if self.hardness_strength < 0:
            raise ValueError(f"expected hardness_strength >= 0, got {self.hardness_strength}")
        if self.scale <= 0:
            raise ValueError(f"expected a positive scale, got {self.scale}")

    def __call__(self, queries: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """The mean over queries; over those of all processes, if ``gather`` and there are several.

        Args:
            queries: (rows, width).
            columns: the positives, and any number of columns of hard negatives, each (rows, width).
        """
        rows = queries.size(0)
        if any(column.size(0) != rows for column in columns):
            sizes = [column.size(0) for column in columns]
            raise ValueError(f"expected as many documents in each column as queries, got {sizes} for {rows} queries")
        every_query, documents, start, total = queries, torch.cat(list(columns)), 0, rows
        gathers = self.gather and dist.is_available() and dist.is_initialized()
        if gathers:
            per_rank = [n for (n,) in rows_per_rank(rows, device=queries.device)]
            every_query = gather_rows(queries, per_rank)
            documents = torch.cat([gather_rows(column, per_rank) for column in columns])
            start, total = sum(per_rank[: dist.get_rank()]), sum(per_rank)
        own = torch.arange(start, start + rows, device=queries.device)
        mine, dtype = self._sum(queries, own, columns[0], every_query, documents)
        return over_processes(mine, total, dtype) if gathers else (mine / max(total, 1)).to(dtype)

    def _sum(
        self, queries: Tensor, own: Tensor, positives: Tensor, every_query: Tensor, documents: Tensor
    ) -> tuple[Tensor, torch.dtype]:
        """The sum over queries, in at least 32 bits, and the dtype of the loss."""
        dtype = queries.dtype
        weighted = self.hardness_mode is not None and self.hardness_strength > 0
        if CHUNKED and self.cosine and not weighted and set(self.directions) == {"query_to_doc"} and len(queries):
            with torch.autocast(queries.device.type, enabled=False):
                x, y = (F.normalize(each.to(wide(each.dtype)), dim=1) for each in (queries, documents))
            total = chunked_cross_entropy(x, y, own, scale=self.scale, tile_rows=self.tile_rows)
            return total, total.dtype if torch.is_autocast_enabled(queries.device.type) else dtype

        def tile(queries: Tensor, own: Tensor, positives: Tensor, every_query: Tensor, documents: Tensor) -> Tensor:
            nonlocal dtype
            losses = self._per_query(queries, own, positives, every_query, documents)
            dtype = losses.dtype
            return losses.sum(dtype=wide(dtype))

        by_tiles = tiled(tile, tile_rows=self.tile_rows, cut=(1, 2), reduction="sum")
        return by_tiles(queries, own, positives, every_query, documents), dtype

    def _per_query(
        self, queries: Tensor, own: Tensor, positives: Tensor, every_query: Tensor, documents: Tensor
    ) -> Tensor:
        """The loss of each query of a tile; ``own``: its number among all queries."""
        rows, total = torch.arange(len(queries), device=queries.device), every_query.size(0)
        similar = self.similarity_fct(queries, documents)
        scores = {"query_to_doc": similar * self.scale}
        if self.hardness_mode is not None and self.hardness_strength > 0:
            weighted = self._weighted(own, total, documents.size(0))
            # Unscaled similarities, without a gradient.
            scores["query_to_doc"] = scores["query_to_doc"] + self.hardness_strength * similar.detach() * weighted
        if "query_to_query" in self.directions:
            scores["query_to_query"] = (self.similarity_fct(queries, every_query) * self.scale).index_put(
                (rows, own), similar.new_tensor(-torch.inf)
            )
        if "doc_to_query" in self.directions:
            scores["doc_to_query"] = self.similarity_fct(every_query, positives).T * self.scale
        if "doc_to_doc" in self.directions:
            same = _of_own(own, total, documents.size(0))
            scores["doc_to_doc"] = (self.similarity_fct(documents, positives).T * self.scale).masked_fill(
                same, -torch.inf
            )
        right = scores["query_to_doc"][rows, own]
        if self.partition_mode == "joint":
            normaliser = torch.cat([scores[name] for name in DIRECTIONS if name in scores], dim=1).logsumexp(1)
        else:
            normaliser = torch.stack([each.logsumexp(1) for each in scores.values()]).mean(0)
        return normaliser - right

    def _weighted(self, own: Tensor, total: int, documents: int) -> Tensor:
        """Mask of the candidates whose weight grows with their similarity, (rows of a tile, documents)."""
        is_own = _of_own(own, total, documents)
        if self.hardness_mode == "in_batch_negatives":
            return ~is_own
        positives = torch.arange(documents, device=own.device) < total
        if self.hardness_mode == "hard_negatives":
            return is_own & ~positives
        return ~(is_own & positives)


def _of_own(own: Tensor, total: int, documents: int) -> Tensor:
    """Mask of the documents that belong to each query of a tile; columns of ``total`` documents are concatenated."""
    return torch.arange(documents, device=own.device)[None, :] % total == own[:, None]
