"""Recomputation of layers in backward: saves and restores all state that the second forward depends on."""
