"""The losses of sentence-transformers that cache, with the same arguments, on this package's GradCache.

Each replaces the class of its name, of release 6: the constructor, ``forward``, ``calculate_loss`` and
``get_config_dict`` are called the same way, a trainer calls it as it calls any loss, and ``MatryoshkaLoss`` can wrap
it. Differences inside: every generator and buffer is replayed, the second pass runs in the caller's ``backward()`` and
adds all gradients at once, an ``OffloadModel`` inside of the model is loaded once a pass for all mini-batches,
processes may have different numbers of rows.

Nothing is imported from that package: a model is any module that maps a dict of features to a dict with
``"sentence_embedding"``.
"""

from gradcache.sentence_transformers.cached_loss import cos_sim
from gradcache.sentence_transformers.losses import (
    CachedGISTEmbedLoss,
    CachedMultipleNegativesRankingLoss,
    CachedMultipleNegativesSymmetricRankingLoss,
    MegaBatchMarginLoss,
)

__all__ = [
    "CachedGISTEmbedLoss",
    "CachedMultipleNegativesRankingLoss",
    "CachedMultipleNegativesSymmetricRankingLoss",
    "MegaBatchMarginLoss",
    "cos_sim",
]
