"""The optimizer of an :class:`~offload.OffloadModel`: any ``torch.optim`` class, its states beside the shards."""

from offload.optim.optimizer import OffloadOptimizer

__all__ = ["OffloadOptimizer"]
