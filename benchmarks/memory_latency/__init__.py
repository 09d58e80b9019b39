"""The question ``memory-latency``: what each way to save memory saves, and what it costs in time."""
