"""Optimizers whose states rest beside the shards, and whose updates hide behind compute."""

from offload.optim.optimizer import OffloadOptimizer

__all__ = ["OffloadOptimizer"]
