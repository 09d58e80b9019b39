"""How micro-batches run: stages, checkpoint and recompute, streams, and pipelines over a data loader."""

from pipe.phase import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
