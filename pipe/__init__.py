"""Pipeline parallelism over micro-batches: stages, checkpointing, streams, and pipelined loops over a data loader."""

from pipe.microbatch import NoChunk
from pipe.pipe import BalanceError, Pipe
from pipe.recompute.phase import is_checkpointing, is_recomputing

__all__ = ["BalanceError", "NoChunk", "Pipe", "is_checkpointing", "is_recomputing"]
