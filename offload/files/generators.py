"""Reads and sets the states of the global random number generators, for checkpoints."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["generator_states", "set_generator_states"]


def generator_states() -> dict[str, Any]:
    """States of the generators of torch, of Python, and of NumPy if it is imported."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *numbers = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *numbers)
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restores the result of :func:`generator_states`; CUDA's only if the number of devices is the same."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *numbers = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *numbers))
