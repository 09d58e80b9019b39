"""Runs offloaded models while autograd drives: the graph is real, and the engine only moves bytes."""
