"""Saves and loads checkpoints of model and optimizer as safetensors files with an index, written atomically.

::

    model.safetensors.index.json              the file of each tensor; the only file that is ever replaced
    model-ID-00001-of-00003.safetensors       parameters and buffers, under the bare model's names
    state-ID/optimizer-00001-of-00002...      states of the optimizer, as "state.<parameter>.<name>" of its state_dict()
    state-ID/state.pt                         the remainder: groups, step, generator states, the user's extra

ID is the identity of a save, 32 hexadecimal digits.

Every save writes files under unused names, waits until they are on the disk, and then replaces the index, which is
atomic. So a process killed at any moment leaves an index whose files all exist: the old one or the new one. The next
save removes files of saves that the index does not name (:mod:`offload.files.save_folder`).

Every tensor has a checksum in the header of its file, ``state.pt`` one in the index, and files of ranks one in
``state.pt``. Every file, and the index, has the identity of its save, so files of two saves are not mixed.

With a mesh all ranks write their parts into ``state-ID``, by torch.distributed.checkpoint (:mod:`offload.files.parts`),
and the first one the rest; any number of processes reads them.

The files do not depend on slices or homes, so a checkpoint is loaded into the same model with any others, or into the
bare model.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.parts import StoredParts, named_states, on_all, ranks_of, write_parts
from offload.files.save_folder import CRC, INDEX, Save, read_index, state_folder, write_file
from offload.files.tensor_file import SAVE, ChecksumError, TensorFile, check_plain, write_tensors
from offload.files.untrusted import MOST_BYTES, inside, read_regular, shown
from offload.optim import OffloadOptimizer
from offload.progress import progress
from offload.storage.page_cache import available_bytes
from offload.streaming.quantised import state_in_parts
from offload.streaming.stored_values import StoredValues, deferring_values

__all__ = ["INDEX", "Checkpoint", "generator_states", "load_checkpoint", "save_checkpoint"]


#: The fields of ``state.pt`` beside the user's, with their types. What is in them is that of the checksum in the index.
_FIELDS: dict[str, Any] = {
    "optimizer": dict | None,
    "optimizer_tensors": dict,
    "parts": dict | None,
    "model": dict,
    "step": int,
    "generators": dict | list,
}


# The remainder of a checkpoint beside its tensors, in one small file: read back without running code of the file.


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
    if not isinstance(summary, dict):
        raise ValueError(f"{path}: state: expected a dict, got {shown(summary)}")
    for key, kind in _FIELDS.items():
        if not isinstance(value := summary.get(key), kind):
            raise ValueError(f"{path}: {key}: expected {getattr(kind, '__name__', kind)}, got {shown(value)}")
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


T = TypeVar("T", bound="Tensor | StoredValues")

_FULL = re.compile(r"state\.(\d{1,18})\.(.+)", re.DOTALL)


NOT_COUNTED = -1  #: the steps of an optimizer that is not ours, in the file


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load_checkpoint` returns besides the tensors."""

    #: Steps of the ``OffloadOptimizer`` when it was saved; None with another one, whose steps :attr:`extra` may have.
    step: int | None
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

    Save between ``zero_grad()`` and the next backward: gradients are not part of a checkpoint. With a mesh all ranks
    call this, with one directory that all can reach; buffers and ``extra`` are those of the first rank.

    Args:
        path: a directory; created if it does not exist.
        model: an ``OffloadModel``, or any other module.
        optimizer: an ``OffloadOptimizer``, or any other.
        extra: further state of the run, such as the ``state_dict()`` of a schedule or of a ``GradScaler``: numbers,
            strings and tensors, in lists and dicts.
        file_bytes: maximal size of a file that holds several tensors.

    Raises:
        ValueError: if safetensors cannot hold the type of a tensor; if another save is writing to the directory; or if
            its index is one of weights of another tool, which would be replaced.
        OSError: if the disk is full or fails, with the name of the file; the previous checkpoint is complete, and
            nothing is left behind. With a mesh ranks that did not fail raise another exception that names the one that
            did.
    """
    _check_owner(model, optimizer)
    ranks = ranks_of(model)
    if ranks is None:
        check_plain(dict(model.named_parameters()), "torch.distributed.checkpoint: get_state_dict and dcp.save")
    tensors, others, tied = _model_parts(model)
    states, rest = _optimizer_parts(optimizer)
    names = named_states(model, optimizer)
    model_parts = _split(tensors, file_bytes) if ranks is None else []
    save = Save(Path(path))
    try:
        save.id = on_all(ranks, save.begin, first=True)[0]
        weight_map, state_map, parts = dict[str, str](), dict[str, str](), None
        if ranks is None:
            weight_map = _write_files(save.folder, save.model_files(len(model_parts)), model_parts, tied, save.id)
            state_parts = _split(states, file_bytes)
            files = [f"optimizer-{k:05d}-of-{len(state_parts):05d}.safetensors" for k in range(1, 1 + len(state_parts))]
            state_map = _write_files(save.state, files, state_parts, {}, save.id)
        else:
            again = {name: tensors[first] for name, first in tied.items()}
            parts = write_parts(save.state, cast(dict[str, Tensor], tensors | again), states, names, ranks)
        generators = generator_states()
        summary = {
            "optimizer": rest,
            "optimizer_tensors": state_map,
            "parts": parts,
            "model": others,
            "step": getattr(optimizer, "steps", NOT_COUNTED),
            "generators": generators if ranks is None else ranks.exchange(generators),
            "extra": extra,
        }
        metadata = {
            "total_size": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            SAVE: save.id,
        }
        on_all(ranks, lambda: _commit(save, serialized(summary), metadata, weight_map), first=True)
    except BaseException:
        if ranks is None or ranks.number == 0:
            save.discard()
        raise
    finally:
        save.release()


def _commit(save: Save, state: bytes, metadata: dict[str, Any], weight_map: dict[str, str]) -> None:
    """Makes a save the last one; removes those before."""
    write_file(save.state / "state.pt", state)
    save.commit({"metadata": {**metadata, CRC: f"{zlib.crc32(state):08x}"}, "weight_map": weight_map})


@torch.no_grad()
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Checkpoint:
    """Loads a checkpoint into a model of the same layers, with any number of slices and any home.

    With an optimizer, its states and the generators of torch, Python and NumPy (if it is imported) are restored, so
    training continues bit by bit as if uninterrupted. Generators are restored only by as many processes as saved.
    Without an optimizer only the model is loaded; that works with any directory of safetensors files that has an index.

    Raises:
        FileNotFoundError: if there is no checkpoint, or a file of it is missing.
        ValueError: if a file is damaged, of another save or not a regular file: the error names file and field, nothing
            was changed, and no code of the checkpoint ran. If it does not fit: every wrong name and shape is listed,
            and nothing was changed. Or if bytes are not those that were saved: the error names file and tensor. If the
            files take at most half of the available memory, all of them are verified before the first tensor is
            loaded, so nothing was changed; the second read is then served from memory. For larger checkpoints the
            optimizer states are verified first, the model while it is loaded; the error lists the tensors that hold
            values of the checkpoint already.
    """
    _check_owner(model, optimizer)
    folder = Path(path)
    try:
        index = read_index(folder / INDEX)
    except FileNotFoundError as error:
        what = f"a directory without {INDEX}" if folder.is_dir() else "no directory"
        raise FileNotFoundError(f"expected a checkpoint, got {what} (path={folder})") from error
    files = index.open()
    saved: dict[str, TensorFile | StoredParts] = {name: files[file] for name, file in index.weight_map.items()}
    ranks, parts, state = ranks_of(model), None, folder
    if index.save is None:
        if optimizer is not None:
            raise ValueError(f"{folder} holds a model but no optimizer; load it without one")
        if ours := next((file for file in files.values() if file.save is not None), None):
            raise ValueError(
                f"{ours.path} is of a checkpoint, expected {SAVE} in the metadata of {index.path}; for the weights "
                f"alone use load_pretrained"
            )
        summary: dict[str, Any] = {"model": {}, "step": NOT_COUNTED, "extra": None}
    else:
        state = folder / state_folder(index.save)
        summary = read_state(inside(folder, f"{state.name}/state.pt", str(index.path)), index.metadata[CRC])
        if summary["parts"] is not None:
            parts = StoredParts(state, summary["parts"], ranks)
            saved |= dict.fromkeys(parts.model, parts)
    state_dict = None if optimizer is None else _state_dict(state, summary, index.save, optimizer)
    _check_options(folder, optimizer, state_dict)
    if 2 * sum(file.data_bytes for file in files.values()) <= available_bytes():
        for file in files.values():  # First, so that a damaged shape is not taken for another model.
            file.verify()
    targets = _check_model(folder, model, saved, set(summary["model"]))
    if parts is None:
        _read_model(files, index.weight_map, targets)
    else:
        for number, found in parts.read(cast(dict[str, Tensor], targets), optimizer, ranks).items():
            if state_dict is not None:
                state_dict["state"].setdefault(number, {}).update(found)
    if summary["model"]:
        model.load_state_dict(summary["model"], strict=False)
    if optimizer is not None and state_dict is not None:
        optimizer.load_state_dict(state_dict)
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.steps = max(0, summary["step"])
        generators = summary["generators"]
        if ranks is not None and isinstance(generators, list) and len(generators) == ranks.total:
            set_generator_states(generators[ranks.number])
        elif ranks is None and not isinstance(generators, list):
            set_generator_states(generators)
    step = None if summary["step"] == NOT_COUNTED else summary["step"]
    return Checkpoint(step, summary.get("extra"))


def _check_owner(model: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is None:
        return
    ours, theirs = {id(p) for p in model.parameters()}, [p for group in optimizer.param_groups for p in group["params"]]
    if theirs and not any(id(p) in ours for p in theirs):
        raise ValueError("expected an optimizer of this model, got one that has none of its parameters (optimizer)")


def _check_options(folder: Path, optimizer: Optimizer | None, saved: Mapping[str, Any] | None) -> None:
    """Versions of torch add options to a class; two classes have each what the other one lacks."""
    if optimizer is None or saved is None:
        return
    for here, there in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        lacks, has = sorted(optimizer.defaults.keys() - there.keys()), sorted(there.keys() - here.keys())
        if lacks and has:
            raise ValueError(
                f"{folder} has the states of an optimizer with {', '.join(has)}, got one with {', '.join(lacks)}; load "
                f"the model alone, or pass the class that was saved"
            )


def _read_model(
    files: Mapping[str, TensorFile], places: Mapping[str, str], targets: Mapping[str, Tensor | StoredValues]
) -> None:
    for done, (name, target) in enumerate(progress(list(targets.items()), "loading the model")):
        try:
            files[places[name]].read_into(name, target)
        except ChecksumError as error:
            held = ", ".join(list(targets)[: done + 1])
            raise ChecksumError(
                f"{error}. The model is not usable now: {held} hold values of this checkpoint already, {name} the "
                f"damaged ones, and the other {len(targets) - done - 1} tensors their previous ones"
            ) from error


def _place(tensor: Tensor | StoredValues) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor."""
    if isinstance(tensor, Tensor) and hasattr(tensor, "placements"):
        local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return _place(local) if local.numel() else ("without rows", tensor.dtype, *tensor.shape)
    if not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _values_of(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of a model, without copies of values that homes store in another form."""
    with deferring_values():
        return state_in_parts(model)


def _model_parts(model: nn.Module) -> tuple[dict[str, Tensor | StoredValues], dict[str, Any], dict[str, str]]:
    """Tensors by name; other values by name; and for each further name of a tensor the one that it is stored under."""
    tensors: dict[str, Tensor | StoredValues] = {}
    others: dict[str, Any] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, value in _values_of(model).items():
        if not isinstance(value, (Tensor, StoredValues)):
            others[name] = value
        elif (stored_as := first.setdefault(_place(value), name)) != name:
            tied[name] = stored_as
        else:
            tensors[name] = value
    return tensors, others, tied


def _check_model(
    folder: Path, model: nn.Module, saved: Mapping[str, TensorFile | StoredParts], others: set[str]
) -> dict[str, Tensor | StoredValues]:
    """The model's tensor for each saved one. Raises ValueError that lists every difference."""
    targets: dict[str, Tensor | StoredValues] = {}
    wrong: list[str] = []
    state = _values_of(model)
    here = {name: value for name, value in state.items() if isinstance(value, (Tensor, StoredValues))}
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
    extra = state.keys() - here.keys()
    wrong += [f"{name} is missing" for name in sorted(extra - others)]
    wrong += [f"{name} is not in the model" for name in sorted(others - extra)]
    if wrong:
        raise ValueError(f"the checkpoint {folder} does not fit the model, and nothing was loaded: {'; '.join(wrong)}")
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


def _state_dict(folder: Path, summary: dict[str, Any], save: str | None, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's saved ``state_dict()``, large tensors memory-mapped, without those in parts.

    Raises ValueError if its groups differ, or a tensor is missing.
    """
    rest = summary["optimizer"]
    if rest is None:
        raise ValueError(f"{folder.parent} was saved without an optimizer; load it without one")
    sizes = [len(group["params"]) for group in rest["param_groups"]]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        raise ValueError(
            f"the optimizer of the checkpoint {folder.parent} has groups of {sizes} parameters, expected {expected}; "
            f"nothing was loaded"
        )
    state: dict[int, dict[str, Any]] = {number: dict(values) for number, values in rest["state"].items()}
    where = f"{folder / 'state.pt'}: optimizer_tensors"
    places: dict[str, str] = summary["optimizer_tensors"]
    for name in sorted({*places.values()}):
        file = TensorFile(inside(folder, name, where))
        named = [full for full, place in places.items() if place == name]
        if lost := [full for full in named if full not in file]:
            raise ValueError(f"{file.path}: expected {', '.join(lost)}, got a file without; nothing was loaded")
        file.check_save(save)
        file.verify()
        for full in named:
            match = _FULL.fullmatch(full)
            if match is None or int(match.group(1)) not in state:
                raise ValueError(f"{file.path}: expected states of the optimizer's parameters, got {full}")
            tensor = file.tensor(full)
            # Other optimizers keep the tensors they are given, and would keep the file mapped.
            state[int(match.group(1))][match.group(2)] = (
                tensor if isinstance(optimizer, OffloadOptimizer) else tensor.clone()
            )
    return {"state": state, "param_groups": rest["param_groups"]}


def _split(tensors: Mapping[str, T], file_bytes: int) -> list[dict[str, T]]:
    """The tensors of each file."""
    parts: list[dict[str, T]] = []
    nbytes = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not parts or nbytes + size > file_bytes:
            parts.append({})
            nbytes = 0
        parts[-1][name] = tensor
        nbytes += size
    return parts


def _write_files(
    folder: Path, files: list[str], parts: list[dict[str, T]], tied: Mapping[str, str], save: str
) -> dict[str, str]:
    """Writes tensors of a save to files; returns the file of each."""
    places: dict[str, str] = {}
    for file, part in zip(files, parts, strict=True):
        # As in safetensors.torch.save_model: a tied tensor is stored once, its other names are metadata.
        also = {name: first for name, first in tied.items() if first in part}
        write_tensors(folder / file, part, {**also, SAVE: save})
        places.update(dict.fromkeys(part, file))
    return places
