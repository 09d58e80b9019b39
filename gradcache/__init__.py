"""Contrastive batches larger than memory: representations first, their gradients next, the encoders' gradients last."""

from gradcache.accumulation import Accumulation
from gradcache.context_managers import RandContext
from gradcache.grad_cache import GradCache, StepResult
from gradcache.tiled_loss import tiled

__all__ = ["Accumulation", "GradCache", "RandContext", "StepResult", "tiled"]
