"""Saves and loads checkpoints of model and optimizer as safetensors files with an index, written atomically.

::

    model.safetensors.index.json              the file of each tensor; the only file that is ever replaced
    model-ID-00001-of-00003.safetensors       parameters and buffers, under the bare model's names
    state-ID/optimizer-00001-of-00002...      states of the optimizer, as "state.<parameter>.<name>" of its state_dict()
    state-ID/state.pt                         the remainder: groups, step, generator states, the user's extra
    state-ID/parts.pt, __0_0.distcp, ...      with a mesh: the parts that ranks have written, in place of the tensors

ID is the identity of a save, 32 hexadecimal digits.

Every save writes files under unused names, waits until they are on the disk, and then replaces the index, which is
atomic. So a process killed at any moment leaves an index whose files all exist: the old one or the new one. The next
save removes files of saves that the index does not name (:mod:`offload.files.save_folder`).

The index has size and checksum of each file, and of itself, so what was damaged or is of another save is refused before
anything is loaded.

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
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.index import INDEX, read_index
from offload.files.parts import PARTS, StoredParts, named_states, on_all, ranks_of, write_parts
from offload.files.save_folder import Save
from offload.files.tensor_file import open_tensors, write_tensors
from offload.forms.quantised import state_in_parts
from offload.optim import OffloadOptimizer
from offload.progress import progress
from offload.streaming.stored_values import StoredValues, deferring_values

__all__ = ["INDEX", "Checkpoint", "generator_states", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True)
class _State:
    """The remainder of a checkpoint beside its tensors, in one small file: read back without running code of it."""

    #: Groups and small states of the optimizer.
    optimizer: dict[str, Any] | None
    #: Values of the model that are no tensors.
    model: Mapping[str, Any]
    #: See :class:`Checkpoint`.
    step: int | None
    #: With a mesh, a list of those of all ranks.
    generators: Any
    extra: Any

    def pack(self) -> bytes:
        """The bytes of ``state.pt``. Raises ValueError if ``torch.load(weights_only=True)`` would refuse it."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"expected numbers, strings and tensors in lists and dicts as extra, and as hyperparameters of the "
                f"optimizer, got what torch.load(weights_only=True) refuses: {str(error).splitlines()[0]}"
            ) from error
        return buffer.getvalue()

    @classmethod
    def read(cls, path: Path) -> _State:
        """Reads ``state.pt``. Raises ValueError if it is none."""
        try:
            with zipfile.ZipFile(path) as archive:
                # Without this, a compressed entry could take a thousand times the memory of the file.
                if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                    raise ValueError("its entries are larger than the file")
            return cls(**torch.load(path, weights_only=True))
        except Exception as error:  # The archive and what is in it raise anything, such as AttributeError.
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path}: expected the state of a checkpoint, got a damaged file: {reason}") from error


def generator_states() -> dict[str, Any]:
    """States of the generators of torch, of Python, and of NumPy if it is imported."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *numbers = numpy.random.get_state()
        states["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *numbers)
    return states


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restores the result of :func:`generator_states`; CUDA's only if the number of devices is the same."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *numbers = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *numbers))


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
    for name, parameter in model.named_parameters() if ranks is None else ():
        if hasattr(parameter, "placements"):
            raise TypeError(
                f"expected plain tensors, got a {type(parameter).__name__} ({name}), of which each rank has a part; "
                f"use torch.distributed.checkpoint: get_state_dict and dcp.save"
            )
    tensors, others, tied = _model_parts(model)
    states, rest = _optimizer_parts(optimizer)
    names = named_states(model, optimizer)
    save = Save(Path(path))
    try:
        save.id = on_all(ranks, save.begin, first=True)[0]
        weight_map, parts = dict[str, str](), None
        if ranks is None:
            weight_map = _write_files(save, f"model-{save.id}", tensors, tied, file_bytes)
            _write_files(save, "optimizer", states, {}, file_bytes)
        else:
            again = {name: tensors[first] for name, first in tied.items()}
            parts, sums = write_parts(save.state, cast(dict[str, Tensor], tensors | again), states, names, ranks)
            for name, sum_of_file in sums.items():
                save.note(name, sum_of_file)
        generators = generator_states()
        state = _State(
            optimizer=rest,
            model=others,
            step=getattr(optimizer, "steps", None),
            generators=generators if ranks is None else ranks.exchange(generators),
            extra=extra,
        )

        def commit() -> None:
            save.write("state.pt", state.pack())
            if parts is not None:
                save.write(PARTS, parts)
            save.commit(weight_map, sum(tensor.nbytes for tensor in tensors.values()))

        on_all(ranks, commit, first=True)
    except BaseException:
        if ranks is None or ranks.number == 0:
            save.discard()
        raise
    finally:
        save.release()


@torch.no_grad()
def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Checkpoint:
    """Loads a checkpoint into a model of the same layers, with any number of slices and any home.

    With an optimizer, its states and the generators of torch, Python and NumPy (if it is imported) are restored, so
    training continues bit by bit as if uninterrupted. Generators are restored only by as many processes as saved.
    Without an optimizer only the model is loaded; that works with any directory of safetensors files that has an index.

    Raises:
        FileNotFoundError: if there is no checkpoint, or a file of it is missing.
        ValueError: if a file is damaged, of another save or not a regular file: the error names it, nothing was
            changed, and no code of the checkpoint ran. All files are read once to be verified, before they are loaded.
            Or if it does not fit: every wrong name and shape is listed, and nothing was changed.
    """
    _check_owner(model, optimizer)
    folder = Path(path)
    try:
        index = read_index(folder / INDEX)
    except FileNotFoundError as error:
        what = f"a directory without {INDEX}" if folder.is_dir() else "no directory"
        raise FileNotFoundError(f"expected a checkpoint, got {what} (path={folder})") from error
    stored = index.open()
    saved = {name: tensor.mapped for name, tensor in stored.items()}
    ranks, parts, state, state_dict = ranks_of(model), None, _State(None, {}, None, None, None), None
    if index.save is None:
        if optimizer is not None:
            raise ValueError(f"{folder} holds a model but no optimizer; load it without one")
    else:
        states = folder / f"state-{index.save}"
        wanted = [name for name in sorted(index.files) if optimizer is not None or "/optimizer-" not in name]
        # First, so that a damaged shape is not taken for another model.
        mine = wanted if ranks is None else wanted[ranks.number :: ranks.total]
        on_all(ranks, partial(index.verify, mine))
        state = _State.read(states / "state.pt")
        if f"{states.name}/{PARTS}" in index.files:
            parts = StoredParts(states, [Path(name).name for name in index.files])
            saved |= parts.model
    targets = _check_model(folder, model, saved, set(state.model))
    if optimizer is not None:
        # After the names of the model, which tell more of another one than the sizes of groups.
        state_dict = _state_dict(folder, state, [f for f in sorted(index.files) if "/optimizer-" in f], optimizer)
    if parts is None:
        for name, target in progress(list(targets.items()), "loading the model"):
            stored[name].read_into(target)
    else:
        for number, found in parts.read(cast(dict[str, Tensor], targets), optimizer, ranks).items():
            if state_dict is not None:
                state_dict["state"].setdefault(number, {}).update(found)
    if state.model:
        model.load_state_dict(dict(state.model), strict=False)
    if optimizer is not None and state_dict is not None:
        optimizer.load_state_dict(state_dict)
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.steps = state.step or 0
        generators = state.generators
        if ranks is not None and isinstance(generators, list) and len(generators) == ranks.total:
            set_generator_states(generators[ranks.number])
        elif ranks is None and not isinstance(generators, list):
            set_generator_states(generators)
    return Checkpoint(state.step, state.extra)


def _check_owner(model: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is None:
        return
    ours, theirs = {id(p) for p in model.parameters()}, [p for group in optimizer.param_groups for p in group["params"]]
    if theirs and not any(id(p) in ours for p in theirs):
        raise ValueError("expected an optimizer of this model, got one that has none of its parameters (optimizer)")


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
    folder: Path, model: nn.Module, saved: Mapping[str, Tensor], others: set[str]
) -> dict[str, Tensor | StoredValues]:
    """The model's tensor for each saved one. Raises ValueError that lists every difference."""
    targets: dict[str, Tensor | StoredValues] = {}
    wrong: list[str] = []
    state = _values_of(model)
    here = {name: value for name, value in state.items() if isinstance(value, (Tensor, StoredValues))}
    places = {_place(here[name]) for name in saved if name in here}
    wrong += [f"{name} is missing" for name, value in here.items() if name not in saved and _place(value) not in places]
    for name, tensor in saved.items():
        if name not in here:
            wrong.append(f"{name} is not in the model")
            continue
        target = targets[name] = here[name]
        if tensor.shape != target.shape:
            wrong.append(f"{name} is {tuple(tensor.shape)}, expected {tuple(target.shape)}")
        elif torch.promote_types(tensor.dtype, target.dtype) != target.dtype:
            wrong.append(f"{name} is {tensor.dtype} and would lose digits as {target.dtype}")
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


def _state_dict(folder: Path, saved: _State, files: Collection[str], optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's saved ``state_dict()``, large tensors memory-mapped, without those in parts.

    Raises ValueError for another optimizer: its groups, or what their options are called.
    """
    rest = saved.optimizer
    if rest is None:
        raise ValueError(f"{folder} was saved without an optimizer; load it without one")
    sizes, expected = (
        [len(group["params"]) for group in each] for each in (rest["param_groups"], optimizer.param_groups)
    )
    if sizes != expected:
        raise ValueError(
            f"the optimizer of the checkpoint {folder} has groups of {sizes} parameters, expected {expected}; "
            f"nothing was loaded"
        )
    for here, there in zip(optimizer.param_groups, rest["param_groups"], strict=True):
        lacks, has = sorted(optimizer.defaults.keys() - there.keys()), sorted(there.keys() - here.keys())
        # Versions of torch add options to a class; two classes have each what the other one lacks.
        if lacks and has:
            raise ValueError(
                f"{folder} has the states of an optimizer with {', '.join(has)}, got one with {', '.join(lacks)}; load "
                f"the model alone, or pass the class that was saved"
            )
    for name in files:
        for full, stored in open_tensors(folder / name).items():
            _, number, key = full.split(".", 2)
            tensor = stored.mapped
            # Other optimizers keep the tensors they are given, and would keep the file mapped.
            rest["state"][int(number)][key] = tensor if isinstance(optimizer, OffloadOptimizer) else tensor.clone()
    return rest


def _write_files(
    save: Save, begin: str, tensors: Mapping[str, Tensor | StoredValues], tied: Mapping[str, str], file_bytes: int
) -> dict[str, str]:
    """Writes tensors to files of a save; returns the file of each."""
    parts: list[dict[str, Tensor | StoredValues]] = []
    left = 0
    for name, tensor in tensors.items():
        left -= tensor.nbytes
        if not parts or left < 0:
            parts.append({})
            left = file_bytes - tensor.nbytes
        parts[-1][name] = tensor
    places: dict[str, str] = {}
    for k, part in enumerate(parts, 1):
        name = f"{begin}-{k:05d}-of-{len(parts):05d}.safetensors"
        # As in safetensors.torch.save_model: a tied tensor is stored once, its other names are metadata.
        also = {other: first for other, first in tied.items() if first in part}
        place = save.note(name, write_tensors(save.path(name), part, also))
        places.update(dict.fromkeys(part, place))
    return places
