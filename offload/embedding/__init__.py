"""Embedding tables in host memory or files, of which only a batch's rows are copied to the device; their optimizer."""
