"""The remainder of a checkpoint beside its tensors, in one small file: read back without running code of the file."""

from __future__ import annotations

import io
import pickle
import random
import sys
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.files.tensor_file import ChecksumError
from offload.files.untrusted import MOST_BYTES, read_regular, shown
from offload.storage.page_cache import available_bytes

__all__ = ["check_generators", "generator_states", "read_state", "serialized", "set_generator_states"]


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


def read_state(path: Path, expected: str) -> dict[str, Any]:
    """Reads ``state.pt``, whose checksum is ``expected``.

    Raises ChecksumError, or ValueError that names the field, if it is damaged.
    """
    serialized = read_regular(path, max(MOST_BYTES, available_bytes()))
    if (found := f"{zlib.crc32(serialized):08x}") != expected:
        raise ChecksumError(
            f"{path}: the bytes are not those that were written (checksum {found}, expected {expected}), and nothing "
            f"was loaded. Restore the file from a copy, or load another checkpoint"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(serialized)) as archive:
            # Without this, a compressed entry could take a thousand times the memory of the file.
            if sum(entry.file_size for entry in archive.infolist()) > len(serialized):
                raise ValueError("its entries are larger than the file")
        summary: Any = torch.load(io.BytesIO(serialized), weights_only=True)
    except Exception as error:  # The archive and what is in it raise anything, such as AttributeError.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: expected the state of a checkpoint, got a damaged file: {reason}") from error
    _check(summary, path)
    return summary  # type: ignore[no-any-return]


def _check(summary: Any, path: Path) -> None:
    """Raises ValueError for a field that is missing or of another type."""

    def expect(right: bool, field: str, expected: str, value: Any) -> None:
        if not right:
            raise ValueError(f"{path}: {field}: expected {expected}, got {shown(value)}")

    def is_dict(value: Any, keys: type, values: type = object) -> bool:
        return isinstance(value, dict) and _all_are(keys, value) and _all_are(values, value.values())

    expect(isinstance(summary, dict), "state", "a dict", summary)
    for key in ("optimizer", "optimizer_tensors", "parts", "model", "step", "extra", "generators"):
        expect(key in summary, key, "a value", None)
    model, step, places, rest = (summary[key] for key in ("model", "step", "optimizer_tensors", "optimizer"))
    expect(is_dict(model, str), "model", "names", model)
    expect(type(step) is int and step >= 0, "step", "a number of steps", step)
    expect(is_dict(places, str, str), "optimizer_tensors", "names", places)
    generators = summary["generators"]
    for each in generators if isinstance(generators, list) else [generators]:
        try:
            check_generators(each)
        except Exception as error:
            raise ValueError(f"{path}: generators: expected states of generators, got {error!r}") from error
    if rest is None:
        return
    expect(isinstance(rest, dict), "optimizer", "a dict or None", rest)
    state, groups = rest.get("state"), rest.get("param_groups")
    expect(is_dict(state, int, dict), "optimizer.state", "a dict of each parameter", state)
    expect(isinstance(groups, list) and _all_are(dict, groups), "optimizer.param_groups", "a list of dicts", groups)
    for group in groups:
        numbers = group.get("params")
        expect(isinstance(numbers, list) and _all_are(int, numbers), "optimizer.param_groups", "params", numbers)


def _all_are(kind: type, values: Any) -> bool:
    return all(isinstance(value, kind) for value in values)


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


def check_generators(states: Mapping[str, Any]) -> None:
    """Raises, before anything is changed, for states that :func:`set_generator_states` could not restore."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_python_state(states))
    for state in states.get("cuda", ()):
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
            raise ValueError(f"cuda: expected bytes, got {shown(state)}")
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.RandomState().set_state(_numpy_state(states))


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restores the result of :func:`generator_states`; CUDA's only if the number of devices is the same."""
    torch.set_rng_state(states["torch"])
    random.setstate(_python_state(states))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(_numpy_state(states))


def _python_state(states: Mapping[str, Any]) -> tuple[Any, ...]:
    version, internal, gauss = states["python"]
    return version, tuple(internal), gauss


def _numpy_state(states: Mapping[str, Any]) -> tuple[Any, ...]:
    kind, keys, *numbers = states["numpy"]
    return kind, keys.numpy().astype("uint32"), *numbers
