"""How micro-batches run: stages, checkpoint and recompute, streams, and pipelines over a data loader."""
