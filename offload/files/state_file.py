"""The remainder of a checkpoint beside its tensors, in one small file: read back without running code of the file."""

from __future__ import annotations

import io
import pickle
import random
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.files.tensor_file import ChecksumError

__all__ = ["generator_states", "read_state", "serialized", "set_generator_states"]


def serialized(summary: dict[str, Any]) -> bytes:
    """The bytes of ``state.pt``. Raises ValueError if ``torch.load(weights_only=True)`` would refuse it."""
    buffer = io.BytesIO()
    torch.save(summary, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"expected numbers, strings and tensors in lists and dicts as extra, and as hyperparameters of the "
            f"optimizer, got what torch.load(weights_only=True) refuses: {str(error).splitlines()[0]}"
        ) from error
    return buffer.getvalue()


def read_state(path: Path, expected: str | None) -> dict[str, Any]:
    """Reads ``state.pt``. Raises ChecksumError or ValueError if it is damaged."""
    serialized = path.read_bytes()
    if expected is not None and (found := f"{zlib.crc32(serialized):08x}") != expected:
        raise ChecksumError(
            f"{path}: the bytes are not those that were written (checksum {found}, expected {expected}), and nothing "
            f"was loaded. Restore the file from a copy, or load another checkpoint"
        )
    try:
        summary: dict[str, Any] = torch.load(io.BytesIO(serialized), weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError, KeyError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: expected the state of a checkpoint, got a damaged file: {reason}") from error
    return summary


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
