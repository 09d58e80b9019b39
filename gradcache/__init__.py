"""Contrastive batches larger than memory: representations first, their gradients next, the encoders' gradients last."""

from gradcache.context_managers import RandContext
from gradcache.grad_cache import GradCache, StepResult

__all__ = ["GradCache", "RandContext", "StepResult"]
