"""Recomputation: everything that a second run of a layer must see as the first run saw it."""
