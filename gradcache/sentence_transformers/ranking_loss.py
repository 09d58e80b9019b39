"""``CachedMultipleNegativesRankingLoss`` and its symmetric form: each anchor's positive among all documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gradcache.ranking import Ranking
from gradcache.sentence_transformers.cached_loss import CachedLoss
from gradcache.sentence_transformers.similarity import cos_sim, name_of

__all__ = ["CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss"]


class CachedMultipleNegativesRankingLoss(CachedLoss):
    """Ranks each anchor's positive among the documents of the whole batch, encoding ``mini_batch_size`` rows at a time.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included.
        scale: similarities are multiplied by it.
        similarity_fct: ``similarity_fct(a, b)`` returns (rows of a, rows of b).
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        gather_across_devices: use the candidates of all processes; no effect in a single process.
        directions: what each anchor and each positive is compared with, see ``ranking``.
        partition_mode: ``"joint"``: one softmax over all directions; ``"per_direction"``: the mean of one for each.
        show_progress_bar: accepted for compatibility; this loss prints nothing.
        hardness_mode: the negatives whose weight grows with their similarity: ``"in_batch_negatives"``,
            ``"hard_negatives"``, ``"all_negatives"`` or None.
        hardness_strength: factor of this weight.

    Raises:
        ValueError: for invalid arguments.

    Source: Henderson et al., "Efficient Natural Language Response Suggestion" (2017); Gao et al. (2021) for the cache.
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
        self._ranking()

    def _ranking(self) -> Ranking:
        return Ranking(
            self.similarity_fct,
            self.scale,
            self.directions,
            self.partition_mode,
            self.hardness_mode,
            self.hardness_strength,
            self.mini_batch_size,
            self.gather_across_devices,
            cosine=self.similarity_fct is cos_sim,
        )

    def _loss(self, columns: list[Tensor], context: Any) -> Tensor:
        return self._ranking()(columns[0], columns[1:])

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for a model card."""
        return super().get_config_dict() | {"similarity_fct": name_of(self.similarity_fct)}

    @property
    def temperature(self) -> float:
        """The divisor of similarities."""
        return 1.0 / self.scale

    @property
    def citation(self) -> str:
        """The source in BibTeX, for a model card."""
        return (
            "\n@inproceedings{gao2021scaling,\n"
            "    title = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},\n"
            "    author = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},\n"
            "    booktitle = {Proceedings of the 6th Workshop on Representation Learning for NLP},\n"
            "    year = {2021},\n"
            "    url = {https://arxiv.org/abs/2101.06983}\n"
            "}\n"
        )


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
