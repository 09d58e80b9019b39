"""How micro-batches run: stages, checkpoint and recompute, streams, and pipelines over a data loader."""

from pipe.microbatch import NoChunk
from pipe.pipe import BalanceError, Pipe
from pipe.recompute.phase import is_checkpointing, is_recomputing
from pipe.schedule import Schedule

__all__ = ["BalanceError", "NoChunk", "Pipe", "Schedule", "is_checkpointing", "is_recomputing"]
