"""The losses: of ranking, of ranking with a guide, and of margins.

Directions of ranking:

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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.distributed import RowsOfAll, unwrapped
from gradcache.loss import sum_by_tiles, tiled
from gradcache.sentence_transformers.cached_loss import (
    CachedLoss,
    Columns,
    columns_of,
    cos_sim,
    embedding_in,
    joined,
    name_of,
    precise_cos_sim,
)
from pipe.nested import map_tensors

__all__ = [
    "CachedGISTEmbedLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "MegaBatchMarginLoss",
]

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
        arguments = queries, rows.own, positives, rows.gathered(queries), documents
        return rows.mean(*sum_by_tiles(self._per_query, self.mini_batch_size, (1, 2), *arguments))

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
        if self.hardness_mode is not None and self.hardness_strength > 0:
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
        options = mini_batch_size, mini_batch_num_tokens, gather_across_devices
        directions = "query_to_doc", "doc_to_query"
        super().__init__(model, scale, similarity_fct, *options, directions, "per_direction", show_progress_bar)


class CachedGISTEmbedLoss(CachedLoss):
    """Ranks each anchor's positive among candidates that the guide finds less similar than the positive.

    Candidates of an anchor are the positives and hard negatives of the whole batch, the other anchors, and, seen from
    its positive, the other positives. One that the guide finds more similar than the threshold does not count.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included. Has
            a ``tokenizer`` and a ``max_seq_length``, as the guide has.
        guide: a second model, which is not trained. If its vocabulary differs, or its texts are shorter, it gets texts
            that are decoded from the model's tokens, through its ``preprocess``.
        temperature: cosines are divided by it.
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        show_progress_bar: accepted for compatibility; this loss prints nothing.
        margin_strategy: the threshold is the guide's cosine of anchor and positive, less ``margin`` (``"absolute"``) or
            less ``margin`` times its absolute value (``"relative"``).
        margin: see ``margin_strategy``.
        contrast_anchors: whether other anchors are candidates.
        contrast_positives: whether other positives, seen from the positive, are candidates.
        gather_across_devices: use the positives and negatives of all processes; no effect in a single process.

    Raises:
        ValueError: for invalid arguments.

    Source: Solatorio, "GISTEmbed: Guided In-sample Selection of Training Negatives" (2024); Gao et al. (2021) for the
    cache.
    """

    citation = """
@misc{solatorio2024gistembed,
    title = {GISTEmbed: Guided In-sample Selection of Training Negatives for Text Embedding Fine-tuning},
    author = {Aivin V. Solatorio},
    year = {2024},
    eprint = {2402.16829},
    archivePrefix = {arXiv}
}
"""

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        temperature: float = 0.01,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        margin_strategy: str = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
    ) -> None:
        super().__init__(model, mini_batch_size, mini_batch_num_tokens, show_progress_bar)
        if margin_strategy not in ("absolute", "relative"):
            raise ValueError(f"expected margin_strategy 'absolute' or 'relative', got {margin_strategy!r}")
        if temperature <= 0:
            raise ValueError(f"expected a positive temperature, got {temperature}")
        self.guide = guide
        self.temperature = temperature
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        self.gather_across_devices = gather_across_devices
        #: Whether the guide reads other tokens than the model.
        shorter = _longest(guide) < _longest(model)
        self.must_retokenize = _vocabulary(model, "model") != _vocabulary(guide, "guide") or shorter

    def calculate_loss(self, reps: Columns, reps_guided: Any = None, *, with_backward: bool = False) -> Tensor:
        """The loss of representations of anchors, positives, and hard negatives.

        Args:
            reps: one tensor for each column, or a list of tensors to be concatenated.
            reps_guided: those of the guide.
            with_backward: fill ``.grad`` of the representations, and return the detached value.

        Raises:
            ValueError: without a column of the guide for each column.
        """
        if reps_guided is None or len(reps) != len(reps_guided):
            given = "none" if reps_guided is None else len(reps_guided)
            raise ValueError(f"expected {len(reps)} columns of representations by the guide, got {given}")
        return super().calculate_loss(reps, reps_guided, with_backward=with_backward)

    def _context(self, columns: list[dict[str, Tensor]], labels: Tensor | None) -> list[list[Tensor]]:
        """The guide's representations of each column."""
        with torch.no_grad():
            decoded = self._decoded if self.must_retokenize else None
            return [[rep] for rep in self._encoded(self.guide, columns, decoded)]

    def _decoded(self, chunk: Any) -> Any:
        """The texts of a mini-batch, decoded and tokenized again for the guide."""
        tokens = chunk[0][0]["input_ids"]
        tokenizer: Any = unwrapped(self.model).tokenizer
        guide: Any = unwrapped(self.guide)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        features = (getattr(guide, "preprocess", None) or guide.tokenize)(texts)
        device = getattr(guide, "device", tokens.device)
        return [map_tensors(lambda x: x.to(device), dict(features))], {}

    def _loss(self, columns: list[Tensor], context: Any) -> Tensor:
        """The mean over anchors; over those of all processes, if they are gathered and there are several."""
        guided = [joined(rep).detach() for rep in context]
        rows = RowsOfAll([*columns, *guided], self.gather_across_devices)
        anchors, candidates = columns[0], [rows.gathered(column) for column in columns[1:]]
        by_guide = [rows.gathered(column) for column in guided[1:]]
        by_tiles = tiled(self._of_tile, tile_rows=self.mini_batch_size, cut=(1, 2, 3, 4), reduction="sum")
        every = anchors, candidates, guided[0], by_guide
        mine = by_tiles(anchors, columns[1], guided[0], guided[1], rows.own, every)
        return rows.mean(mine, mine.dtype)

    def _of_tile(
        self, anchors: Tensor, positives: Tensor, by_guide: Tensor, positives_by_guide: Tensor, own: Tensor, every: Any
    ) -> Tensor:
        """The sum over anchors of a tile.

        Args:
            anchors: of the tile, as are the positives, and both by the guide.
            own: the number of each anchor among all.
            every: all anchors and candidates, and both by the guide.
        """
        every_anchor, candidates, every_anchor_by_guide, candidates_by_guide = every
        rows = torch.arange(len(anchors), device=anchors.device)
        similar = precise_cos_sim(by_guide, candidates_by_guide[0])
        threshold = similar[rows, own, None]
        less = self.margin if self.margin_strategy == "absolute" else threshold.abs() * self.margin
        threshold = threshold - less

        def scores(a: Tensor, b: Tensor, similar: Tensor) -> Tensor:
            return precise_cos_sim(a, b).masked_fill(similar > threshold, -torch.inf)

        similar = similar.index_put((rows, own), similar.new_tensor(-torch.inf))  # the positive itself always counts
        found = [scores(anchors, candidates[0], similar)]
        if self.contrast_anchors:
            found.append(scores(anchors, every_anchor, precise_cos_sim(by_guide, every_anchor_by_guide)))
        if self.contrast_positives:
            found.append(scores(positives, candidates[0], precise_cos_sim(positives_by_guide, candidates_by_guide[0])))
        for negatives, negatives_by_guide in zip(candidates[1:], candidates_by_guide[1:], strict=True):
            found.append(scores(anchors, negatives, precise_cos_sim(by_guide, negatives_by_guide)))
        return F.cross_entropy(torch.cat(found, dim=1) / self.temperature, own, reduction="sum")


def _vocabulary(model: Any, name: str) -> Any:
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"expected a tokenizer of transformers, got {type(tokenizer).__name__} ({name}.tokenizer)")
    return tokenizer.get_vocab()


def _longest(model: Any) -> float:
    length = getattr(model, "max_seq_length", None)
    return float("inf") if length is None else length


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

        def per_anchor(anchors: Tensor, own: Tensor, positives: Tensor) -> Tensor:
            cosines = cos_sim(anchors, positives)
            right = cosines.gather(1, own[:, None])[:, 0]
            hardest = cosines.scatter(1, own[:, None], -torch.inf).max(dim=1).values
            return F.relu(self.positive_margin - right) + F.relu(hardest - self.negative_margin)

        rows = RowsOfAll(columns, gathers=False)
        return rows.mean(*sum_by_tiles(per_anchor, self.mini_batch_size, (1,), anchors, rows.own, positives))
