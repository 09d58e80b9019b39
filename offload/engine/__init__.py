"""Runs the blocks of a model in the user's own graph: autograd decides what runs when, the engine moves bytes."""
