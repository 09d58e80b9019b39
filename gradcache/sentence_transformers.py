"""The cached ranking loss of sentence-transformers, same interface, on this package's step.

``CachedMultipleNegativesRankingLoss`` here takes the place of the class of that name: the constructor, ``forward`` and
``get_config_dict`` are called the same way, and a trainer calls it as it calls any loss. Other inside: every generator
and buffer is replayed, scores are computed by tiles, the second pass runs in the caller's ``backward()`` and puts
gradients together in one piece.

Not here: the options ``directions``, ``partition_mode``, ``hardness_mode``, ``hardness_strength`` and
``mini_batch_num_tokens`` of that package's release 6; passing one is a TypeError.

Nothing is imported from that package: a model is anything that maps a dict of features to a dict with
``"sentence_embedding"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.grad_cache import GradCache
from gradcache.loss import DistributedContrastiveLoss
from gradcache.tiles import tiled

__all__ = ["CachedMultipleNegativesRankingLoss", "cos_sim"]


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every pair of rows, (rows of a, rows of b)."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


class CachedMultipleNegativesRankingLoss(nn.Module):
    """Each anchor against the positives and hard negatives of the whole batch, encoded ``mini_batch_size`` at a time.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included.
        scale: similarities are multiplied by it.
        similarity_fct: ``similarity_fct(a, b)`` returns (rows of a, rows of b).
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        gather_across_devices: take the candidates of all processes.
        show_progress_bar: accepted for callers that pass it; this loss prints nothing.

    Source: Henderson et al., "Efficient Natural Language Response Suggestion" (2017); Gao et al. (2021) for the cache.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        *,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__()
        is_cosine = getattr(similarity_fct, "__name__", "") == "cos_sim"
        if gather_across_devices and not is_cosine:
            raise ValueError(
                "expected similarity_fct=cos_sim with gather_across_devices=True; normalise inside the model"
            )
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.mini_batch_size = mini_batch_size
        self.gather_across_devices = gather_across_devices
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; its ``backward()`` runs the second pass.

        Args:
            sentence_features: features of the anchors, of the positives, and of any number of hard negatives.
            labels: not used.

        Raises:
            ValueError: if there are no positives.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(f"expected features of anchors and of positives at least, got {len(columns)} column")
        # A model is called with the dict as its one argument, not with its members as keywords.
        inputs: list[tuple[list[Any], dict[str, Any]]] = [([dict(features)], {}) for features in columns]
        cache = GradCache([self.model] * len(columns), self.mini_batch_size, _no_loss, get_rep_fn=_sentence_embedding)
        return self.calculate_loss(list(cache.encode(*inputs)))

    def calculate_loss(self, reps: list[Tensor]) -> Tensor:
        """The loss of representations of anchors, positives, and hard negatives."""
        anchors, candidates = reps[0], torch.cat(reps[1:])
        own = torch.arange(anchors.size(0), device=anchors.device)
        if self.gather_across_devices:
            loss = DistributedContrastiveLoss(tile_rows=self.mini_batch_size, temperature=1.0 / self.scale)
            return loss(F.normalize(anchors, dim=1), F.normalize(candidates, dim=1), target=own)
        return tiled(self._tile, tile_rows=self.mini_batch_size, cut=(2,))(anchors, candidates, own)

    def _tile(self, anchors: Tensor, candidates: Tensor, own: Tensor) -> Tensor:
        return F.cross_entropy(self.similarity_fct(anchors, candidates) * self.scale, own)

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for a model card."""
        return {
            "scale": self.scale,
            "similarity_fct": getattr(self.similarity_fct, "__name__", repr(self.similarity_fct)),
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }


def _sentence_embedding(output: Any) -> Tensor:
    embedding: Tensor = output["sentence_embedding"]
    return embedding


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("the loss is computed on the encoded batch")
