"""The benchmark ``memory-latency``."""
