"""Loads pretrained safetensors weights into parameters where they are stored, without a ``state_dict`` in memory.

A checkpoint of a model larger than memory does not fit into memory either. The headers of its files list names, shapes
and types, so parameters are matched first; then each tensor is read once, into the storage of its parameter.

Guarantees
    * An error lists everything that does not fit, before anything is written.
    * Files are mapped, so reading needs no memory; a tensor that is converted for a device needs its own size once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.files.index import read_index
from offload.files.tensor_file import StoredTensor, open_tensors
from offload.forms.quantised import part_names

__all__ = ["KeyMap", "Pretrained", "Unmatched", "load_pretrained", "tensors_of"]

KeyMap = Callable[[str], str | None] | Mapping[str, str]

_INDEX_SUFFIX = ".safetensors.index.json"


class Unmatched(NamedTuple):
    """Names that only one side has: the model's that no file holds, and the files' that the model lacks."""

    missing: list[str]
    unexpected: list[str]


class Pretrained:
    """Named tensors in safetensors files, and the parameter of each.

    Args:
        path: a file; an index file (``*.safetensors.index.json``) that names the file of each tensor; or a directory
            that holds one index, or else one file, as Hugging Face and :func:`~offload.save_checkpoint` write them.
            Of several, the one called ``model`` is used.
        key_map: maps names in the files to names in the model. A function, which returns None for tensors to skip; or
            a mapping of prefixes to their replacements, of which the longest match is used:
            ``{"transformer.wte.": "0.", "transformer.h.0.": "1."}``. Names without a match are unchanged.
        strict: whether both sides must have the same names. If False, parameters without a stored value are unchanged,
            or initialised by their module if they are on the meta device.

    Raises:
        FileNotFoundError: if there is no such file, or an index names missing files.
        ValueError: if a file is damaged, of another format or not a regular file, an index names a file outside of its
            directory (links into the cache of the Hugging Face Hub are followed), several files could be meant, or
            ``key_map`` gives two tensors one name.
    """

    def __init__(self, path: str | os.PathLike[str], *, key_map: KeyMap | None = None, strict: bool = True) -> None:
        self.path = Path(path).absolute()  # its files are opened later, too
        self.strict = strict
        self._stored: dict[str, StoredTensor] = {}
        path = _resolved(self.path)
        self._index = read_index(path) if path.suffix == ".json" else None
        for stored in (open_tensors(path) if self._index is None else self._index.open()).values():
            name = _renamed(stored.name, key_map)
            if name is None:
                continue
            if (other := self._stored.setdefault(name, stored)) is not stored:
                raise ValueError(f"key_map gives {other.name!r} and {stored.name!r} of {self.path} one name, {name!r}")

    def headers(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and type of each tensor, from the headers of the files."""
        return [(name, tuple(one.mapped.shape), one.mapped.dtype) for name, one in self._stored.items()]

    def match(self, modules: Mapping[str, nn.Module]) -> tuple[dict[Tensor, StoredTensor], Unmatched]:
        """The stored tensor for each tensor of some modules. A tensor with several names needs only one of them.

        The files of a checkpoint of ours are read once, to compare their checksums. Raises ValueError if one is
        damaged, or that lists every difference in shapes, kinds of types and, if ``strict``, names.
        """
        tensors = tensors_of(modules)
        names: dict[Tensor, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(tensor, []).append(name)
        found: dict[Tensor, StoredTensor] = {}
        missing: list[str] = []
        wrong: list[str] = []
        for tensor, same in names.items():
            candidates = [name for name in same if name in self._stored]
            if not candidates:
                missing += same
            for name in candidates:
                stored = found[tensor] = self._stored[name]  # the last one is used, as in load_state_dict()
                like = stored.mapped
                if like.shape != tensor.shape:
                    wrong.append(f"{name} has shape {tuple(like.shape)}, expected {tuple(tensor.shape)}")
                elif not torch.can_cast(like.dtype, tensor.dtype):
                    wrong.append(f"{name} is {like.dtype}, which cannot be cast to {tensor.dtype}")
        quantised = [f"{p}.{name}" if p else name for p, module in modules.items() for name in part_names(module)]
        wrong += [
            f"{name} is quantised in the model: load the model before it is quantised"
            for name in self._stored
            if any(name == of or name.startswith(f"{of}.") for of in quantised)
        ]
        unexpected = [stored.name for name, stored in self._stored.items() if name not in tensors]
        if self.strict:
            wrong += [f"missing: {', '.join(missing)}"] if missing else []
            wrong += [f"not in the model: {', '.join(unexpected)}"] if unexpected else []
        if wrong:
            raise ValueError(f"{self.path} does not fit the model, and nothing was loaded: {'; '.join(wrong)}")
        if self._index is not None:
            self._index.verify({*self._index.weight_map.values()})
        return found, Unmatched(missing, unexpected)


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, key_map: KeyMap | None = None, strict: bool = True
) -> Unmatched:
    """Reads the tensors of safetensors files into the parameters and buffers of a model, wherever these are stored.

    Types are converted as by ``load_state_dict()``; tied parameters need one entry. Only tensors are loaded: a layer's
    ``get_extra_state()`` is in no safetensors file. For layers on the meta device pass the path to the constructor:
    ``OffloadModel(layers, ..., pretrained=path)``.

    With a mesh all ranks read the files, and keep their parts.

    Args:
        model: an ``OffloadModel``, or any other module with memory.
        path: see :class:`Pretrained`, as for ``key_map`` and ``strict``.

    Returns:
        The names that only one side has; both empty if ``strict``.

    Raises:
        FileNotFoundError, ValueError: see :class:`Pretrained`; or if shapes, kinds of types or, if ``strict``, names
            differ, or the bytes of a file do not match its checksum. Nothing was written then.

    Source: accelerate's ``load_checkpoint_in_model``, without a ``state_dict`` in between.
    """
    tensors = tensors_of({"": model})
    found, unmatched = Pretrained(path, key_map=key_map, strict=strict).match({"": model})
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise ValueError(
            f"expected a model with memory, got {len(empty)} tensors on the meta device, such as {empty[0]}; wrap its "
            f"layers by OffloadModel(layers, ..., pretrained={str(path)!r})"
        )
    for tensor, stored in found.items():
        stored.read_into(tensor)
    return unmatched


def tensors_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in ``state_dict()``; the objects, not copies."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in modules.items()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _renamed(name: str, key_map: KeyMap | None) -> str | None:
    if key_map is None:
        return name
    if not isinstance(key_map, Mapping):
        return key_map(name)
    beginning = max((key for key in key_map if name.startswith(key)), key=len, default="")
    return key_map.get(beginning, "") + name[len(beginning) :]


def _resolved(path: Path) -> Path:
    """The file or index of a path."""
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"expected safetensors files, got a path that does not exist (path={path})")
        return path
    for pattern in (f"*{_INDEX_SUFFIX}", "*.safetensors"):
        candidates = sorted(path.glob(pattern))
        chosen = [c for c in candidates if c.name in (f"model{_INDEX_SUFFIX}", "model.safetensors")] or candidates
        if len(chosen) > 1:
            raise ValueError(
                f"expected one index or one file in {path}, got {', '.join(c.name for c in chosen)}; pass one of them"
            )
        if chosen:
            return chosen[0]
    raise FileNotFoundError(f"expected *{_INDEX_SUFFIX} or *.safetensors, got a directory without (path={path})")
