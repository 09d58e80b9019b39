"""Contrastive training on batches larger than memory, by gradient caching: the memory of one chunk, exact gradients."""

from gradcache.accumulation import Accumulation
from gradcache.context_managers import RandContext
from gradcache.grad_cache import GradCache, StepResult
from gradcache.tiled_loss import tiled

__all__ = ["Accumulation", "GradCache", "RandContext", "StepResult", "tiled"]
