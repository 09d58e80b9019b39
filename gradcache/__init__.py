"""Contrastive training on batches larger than memory, by gradient caching: the memory of one chunk, exact gradients."""

from gradcache.accumulation import Accumulation
from gradcache.grad_cache import GradCache, StepResult
from gradcache.loss import tiled
from gradcache.two_pass import RandContext

__all__ = ["Accumulation", "GradCache", "RandContext", "StepResult", "tiled"]
