"""Saves and loads checkpoints of model and optimizer as safetensors files with an index, written atomically.

::

    model.safetensors.index.json            the file of each tensor; the only file that is ever replaced
    model-7-00001-of-00003.safetensors      parameters and buffers, under the bare model's names
    state-7/optimizer-00001-of-00002...     states of the optimizer, as "state.<parameter>.<name>" of its state_dict()
    state-7/state.pt                        the remainder: groups, step, generator states, the user's extra

Every save writes files under unused names, waits until they are on the disk, and then replaces the index, which is
atomic. So a process killed at any moment leaves an index whose files all exist: the old one or the new one. The next
save removes unused files.

Every tensor has a checksum in the header of its file, and ``state.pt`` one in the index. Checkpoints of earlier
releases have none, and are loaded without.

The files do not depend on slices or homes, so a checkpoint is loaded into the same model with any others, or into the
bare model.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.tensor_file import ChecksumError, TensorFile, check_plain, read_index, write_all, write_tensors
from offload.optim import OffloadOptimizer
from offload.storage.page_cache import available_bytes
from offload.streaming.quantised import state_in_parts

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint"]

INDEX = "model.safetensors.index.json"

_NAME = re.compile(r"(?:model-(\d+)-\d+-of-\d+\.safetensors|state-(\d+)|index-(\d+)\.json)")


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load_checkpoint` returns besides the tensors."""

    #: Steps of the optimizer when it was saved.
    step: int
    #: The ``extra`` of :func:`save_checkpoint`.
    extra: Any


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    file_bytes: int = 2 << 30,
) -> None:
    """Writes a checkpoint; the previous one in the directory stays complete until the new one is.

    Save between ``zero_grad()`` and the next backward: gradients are not part of a checkpoint.

    Args:
        path: a directory; created if it does not exist.
        model: an ``OffloadModel``, or any other module.
        optimizer: an ``OffloadOptimizer``, or any other.
        extra: further state of the run, such as the ``state_dict()`` of a schedule or of a ``GradScaler``: numbers,
            strings and tensors, in lists and dicts.
        file_bytes: maximal size of a file that holds several tensors.

    Raises:
        ValueError: if safetensors cannot hold the type of a tensor.
        OSError: if the disk is full or fails; the previous checkpoint is complete, and nothing is left behind.
    """
    check_plain(dict(model.named_parameters()), "torch.distributed.checkpoint: get_state_dict and dcp.save")
    folder = Path(path)
    if not folder.exists():
        folder.mkdir(parents=True)
        _sync(folder.parent)
    generation = max((number for _, number in _saves_in(folder)), default=0) + 1
    tensors, others, tied = _model_parts(model)
    states, rest = _optimizer_parts(optimizer)
    state_folder = folder / f"state-{generation}"
    try:
        state_folder.mkdir()
        weight_map = _write_files(folder, f"model-{generation}", tensors, file_bytes, tied)
        state_map = _write_files(state_folder, "optimizer", states, file_bytes, {})
        summary = {
            "optimizer": rest,
            "optimizer_files": sorted(set(state_map.values())),
            "model": others,
            "step": getattr(optimizer, "steps", 0),
            "generators": _generator_states(),
            "extra": extra,
        }
        serialized = _serialized(summary)
        _write_file(state_folder / "state.pt", serialized)
        index = {
            "metadata": {
                "total_size": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
                "gradstream_state": state_folder.name,
                "gradstream_state_crc32": f"{zlib.crc32(serialized):08x}",
            },
            "weight_map": weight_map,
        }
        new_index = folder / f"index-{generation}.json"
        _write_file(new_index, json.dumps(index, indent=2).encode())
        _sync(state_folder)
        _sync(folder)
        os.replace(new_index, folder / INDEX)
    except BaseException:
        # An interrupt may be raised just after the index was replaced. Without this, its files would be removed.
        if _state_of(folder) != state_folder.name:
            _remove(folder, lambda number: number == generation)
        raise
    _sync(folder)
    _remove(folder, lambda number: number < generation)


@torch.no_grad()
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Checkpoint:
    """Loads a checkpoint into a model of the same layers, with any number of slices and any home.

    With an optimizer, its states and the generators of torch, Python and NumPy (if it is imported) are restored, so
    training continues bit by bit as if uninterrupted; with a mesh generators stay as they are. Without one only the
    model is loaded; that works with any directory of safetensors files that has an index.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it does not fit: every wrong name and shape is listed, and nothing was changed. Or if bytes are
            not those that were saved: the error names file and tensor. If the files take at most half of the available
            memory, all of them are verified before the first tensor is loaded, so nothing was changed; the second read
            is then served from memory. For larger checkpoints the optimizer states are verified first, the model while
            it is loaded; the error lists the tensors that hold values of the checkpoint already.
    """
    folder = Path(path)
    try:
        weight_map, metadata = read_index(folder / INDEX)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"expected a checkpoint, got a directory without {INDEX} (path={folder})") from error
    state_name = metadata.get("gradstream_state")
    files = {name: TensorFile(folder / name) for name in set(weight_map.values())}
    saved = {name: files[file] for name, file in weight_map.items()}
    if state_name is None:
        if optimizer is not None:
            raise ValueError(f"{folder} holds a model but no optimizer; load it without one")
        summary: dict[str, Any] = {"model": {}, "step": 0, "extra": None}
    else:
        summary = _read_state(folder / state_name / "state.pt", metadata.get("gradstream_state_crc32"))
    state_dict = None if optimizer is None else _state_dict(folder / str(state_name), summary, optimizer)
    targets = _check_model(model, saved, set(summary["model"]))
    if 2 * sum(file.data_bytes for file in files.values()) <= available_bytes():
        for file in files.values():
            file.verify()
    _read_model(saved, targets)
    if summary["model"]:
        model.load_state_dict(summary["model"], strict=False)
    if optimizer is not None and state_dict is not None:
        optimizer.load_state_dict(state_dict)
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.steps = summary["step"]
        if not any(hasattr(target, "placements") for target in targets.values()):
            _set_generator_states(summary["generators"])
    return Checkpoint(summary["step"], summary["extra"])


def _read_state(path: Path, expected: str | None) -> dict[str, Any]:
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


def _read_model(saved: Mapping[str, TensorFile], targets: Mapping[str, Tensor]) -> None:
    for done, (name, target) in enumerate(targets.items()):
        try:
            saved[name].read_into(name, target)
        except ChecksumError as error:
            held = ", ".join(list(targets)[: done + 1])
            raise ChecksumError(
                f"{error}. The model is not usable now: {held} hold values of this checkpoint already, {name} the "
                f"damaged ones, and the other {len(targets) - done - 1} tensors their previous ones"
            ) from error


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor."""
    if hasattr(tensor, "placements"):
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return _place(local) if local.numel() else ("without rows", *tensor.shape)
    if not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _model_parts(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Tensors by name; other values by name; and for each further name of a tensor the one that it is stored under."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in state_in_parts(model).items():
        if not isinstance(value, Tensor):
            others[name] = value
        elif (stored_as := first.setdefault(_place(value), name)) != name:
            tied[name] = stored_as
        else:
            tensors[name] = value
    return tensors, others, tied


def _check_model(model: nn.Module, saved: Mapping[str, TensorFile], others: set[str]) -> dict[str, Tensor]:
    """The model's tensor for each saved one. Raises ValueError that lists every difference."""
    targets: dict[str, Tensor] = {}
    wrong: list[str] = []
    state = state_in_parts(model)
    here = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    places = {_place(here[name]) for name in saved if name in here}
    wrong += [f"{name} is missing" for name, value in here.items() if name not in saved and _place(value) not in places]
    for name, file in saved.items():
        if name not in here:
            wrong.append(f"{name} is not in the model")
            continue
        target = targets[name] = here[name]
        if file.shape(name) != tuple(target.shape):
            wrong.append(f"{name} is {file.shape(name)}, expected {tuple(target.shape)}")
        elif torch.promote_types(file.dtype(name), target.dtype) != target.dtype:
            wrong.append(f"{name} is {file.dtype(name)} and would lose digits as {target.dtype}")
    extra = {name for name, value in state.items() if not isinstance(value, Tensor)}
    wrong += [f"{name} is missing" for name in sorted(extra - others)]
    wrong += [f"{name} is not in the model" for name in sorted(others - extra)]
    if wrong:
        raise ValueError(f"the checkpoint does not fit the model, and nothing was loaded: {'; '.join(wrong)}")
    return targets


def _optimizer_parts(optimizer: Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """State tensors by name; and the groups and other states."""
    if optimizer is None:
        return {}, None
    state_dict = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    rest: dict[int, dict[str, Any]] = {}
    for number, state in state_dict["state"].items():
        rest[number] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.layout is torch.strided:
                tensors[f"state.{number}.{key}"] = value
            else:
                rest[number][key] = value
    return tensors, {"state": rest, "param_groups": state_dict["param_groups"]}


def _state_dict(folder: Path, summary: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's saved ``state_dict()``, large tensors memory-mapped. Raises ValueError if its groups differ."""
    rest = summary["optimizer"]
    if rest is None:
        raise ValueError(f"{folder.parent} was saved without an optimizer; load it without one")
    sizes = [len(group["params"]) for group in rest["param_groups"]]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, expected {expected}; nothing was loaded"
        )
    state: dict[int, dict[str, Any]] = {number: dict(values) for number, values in rest["state"].items()}
    for name in summary["optimizer_files"]:
        file = TensorFile(folder / name)
        file.verify()
        for full in file:
            _, number, key = full.split(".", 2)
            tensor = file.tensor(full)
            # Other optimizers keep the tensors they are given, and would keep the file mapped.
            state[int(number)][key] = tensor if isinstance(optimizer, OffloadOptimizer) else tensor.clone()
    return {"state": state, "param_groups": rest["param_groups"]}


def _serialized(summary: dict[str, Any]) -> bytes:
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


def _generator_states() -> dict[str, Any]:
    """States of the generators of torch, of Python, and of NumPy if it is imported."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *numbers = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *numbers)
    return states


def _set_generator_states(states: Mapping[str, Any]) -> None:
    """Restores the result of :func:`_generator_states`; CUDA's only if the number of devices is the same."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *numbers = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *numbers))


def _write_files(
    folder: Path, stem: str, tensors: Mapping[str, Tensor], file_bytes: int, tied: Mapping[str, str]
) -> dict[str, str]:
    """Writes tensors to one or more files; returns the file of each."""
    parts: list[dict[str, Tensor]] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and nbytes + size > file_bytes:
            parts.append({})
            nbytes = 0
        parts[-1][name] = tensor
        nbytes += size
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        # As in safetensors.torch.save_model: a tied tensor is stored once, its other names are metadata.
        write_tensors(folder / file, part, {name: first for name, first in tied.items() if first in part})
        places.update(dict.fromkeys(part, file))
    return places


def _write_file(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    """Waits until the entries of a directory are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _state_of(folder: Path) -> str | None:
    """The state folder that the index names."""
    with contextlib.suppress(OSError, ValueError):
        return read_index(folder / INDEX)[1].get("gradstream_state")
    return None


def _saves_in(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files and folders of all saves in a directory, with the number of the save."""
    for entry in list(folder.iterdir()):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            yield entry, int(next(number for number in match.groups() if number is not None))


def _remove(folder: Path, which: Any) -> None:
    for entry, number in _saves_in(folder):
        if which(number):
            with contextlib.suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
