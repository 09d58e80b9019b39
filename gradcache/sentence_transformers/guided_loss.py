"""``CachedGISTEmbedLoss``: a second model, the guide, says which candidates are too similar to count as negatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.distributed.gather import RowsOfAll
from gradcache.distributed.reduction import unwrapped
from gradcache.sentence_transformers.cached_loss import CachedLoss, Columns, joined, precise_cos_sim
from gradcache.tiled_loss import tiled
from pipe.nested import map_tensors

__all__ = ["CachedGISTEmbedLoss"]


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
    _config = (
        *("guide", "temperature", "mini_batch_size", "mini_batch_num_tokens", "margin_strategy", "margin"),
        *("contrast_anchors", "contrast_positives", "gather_across_devices"),
    )

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
        mine = by_tiles(
            *(anchors, columns[1], guided[0], guided[1], rows.own), *(anchors, candidates, guided[0], by_guide)
        )
        return rows.mean(mine, mine.dtype)

    def _of_tile(
        self,
        anchors: Tensor,
        positives: Tensor,
        guided_anchors: Tensor,
        guided_positives: Tensor,
        own: Tensor,
        every_anchor: Tensor,
        candidates: Sequence[Tensor],
        every_guided_anchor: Tensor,
        guided_candidates: Sequence[Tensor],
    ) -> Tensor:
        """The sum over anchors of a tile; ``own``: the number of each among all anchors."""
        rows = torch.arange(len(anchors), device=anchors.device)
        by_guide = precise_cos_sim(guided_anchors, guided_candidates[0])
        threshold = by_guide[rows, own, None]
        less = self.margin if self.margin_strategy == "absolute" else threshold.abs() * self.margin
        threshold = threshold - less

        def scores(a: Tensor, b: Tensor, by_guide: Tensor) -> Tensor:
            return precise_cos_sim(a, b).masked_fill(by_guide > threshold, -torch.inf)

        by_guide = by_guide.index_put((rows, own), by_guide.new_tensor(-torch.inf))  # the positive itself always counts
        found = [scores(anchors, candidates[0], by_guide)]
        if self.contrast_anchors:
            found.append(scores(anchors, every_anchor, precise_cos_sim(guided_anchors, every_guided_anchor)))
        if self.contrast_positives:
            found.append(scores(positives, candidates[0], precise_cos_sim(guided_positives, guided_candidates[0])))
        for negatives, guided in zip(candidates[1:], guided_candidates[1:], strict=True):
            found.append(scores(anchors, negatives, precise_cos_sim(guided_anchors, guided)))
        return F.cross_entropy(torch.cat(found, dim=1) / self.temperature, own, reduction="sum")


def _vocabulary(model: Any, name: str) -> Any:
    tokenizer: Any = getattr(model, "tokenizer", None)
    if not hasattr(tokenizer, "get_vocab"):
        raise ValueError(f"expected a tokenizer of transformers, got {type(tokenizer).__name__} ({name}.tokenizer)")
    return tokenizer.get_vocab()


def _longest(model: Any) -> float:
    length = getattr(model, "max_seq_length", None)
    return float("inf") if length is None else length
