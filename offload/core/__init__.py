"""Runs offloaded models while autograd drives: the graph is real, and the engine only moves bytes."""

import os

#: Whether models run on this engine where it can.
IN_USE = bool(int(os.environ.get("OFFLOAD_CORE", "1")))
