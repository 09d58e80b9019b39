"""Models larger than memory: shards rest at home and stream to the compute device ahead of use."""

from offload.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from offload.embedding import OffloadEmbeddingBag
from offload.model import OffloadModel
from offload.optim import OffloadOptimizer
from offload.plan import Plan
from offload.pretrained import Pretrained, load_pretrained
from offload.rowwise import RowWiseAdagrad
from offload.statistics import Statistics
from offload.tape import Tape
from offload.tier import DiskHome, HomeError

__all__ = [
    "Checkpoint",
    "DiskHome",
    "HomeError",
    "OffloadEmbeddingBag",
    "OffloadModel",
    "OffloadOptimizer",
    "Plan",
    "Pretrained",
    "RowWiseAdagrad",
    "Statistics",
    "Tape",
    "load_checkpoint",
    "load_pretrained",
    "save_checkpoint",
]
