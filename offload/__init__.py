"""Trains models larger than device memory: parameters are stored in host memory or files and loaded ahead of use."""

from offload.embedding.bag import OffloadEmbeddingBag
from offload.embedding.rowwise import RowWiseAdagrad
from offload.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from offload.files.pretrained import Pretrained, load_pretrained
from offload.loading import init_empty_weights
from offload.model import OffloadModel, offload
from offload.optim import OffloadOptimizer
from offload.planning.plan import Plan
from offload.policy import MemoryPolicy
from offload.storage import DiskHome, HomeError
from offload.telemetry.statistics import Statistics

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "DiskHome",
    "HomeError",
    "MemoryPolicy",
    "OffloadEmbeddingBag",
    "OffloadModel",
    "OffloadOptimizer",
    "Plan",
    "Pretrained",
    "RowWiseAdagrad",
    "Statistics",
    "init_empty_weights",
    "load_checkpoint",
    "load_pretrained",
    "offload",
    "save_checkpoint",
]
