"""Reads the index of safetensors files, and opens these: all fit the index and are of one save, or none is used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.files.tensor_file import SAVE, TensorFile
from offload.files.untrusted import inside, parse_object, read_regular, shown

__all__ = ["CRC", "INDEX", "Index", "read_index", "state_folder"]

#: The name of the index of a checkpoint.
INDEX = "model.safetensors.index.json"

#: Key of the checksum of ``state.pt`` in the metadata of the index of a checkpoint, beside the identity of the save.
CRC = "gradstream_state_crc32"

_FORMS = {
    SAVE: ("32 hexadecimal digits", re.compile(r"[0-9a-f]{32}")),
    CRC: ("8 hexadecimal digits", re.compile(r"[0-9a-f]{8}")),
}


def state_folder(save: str) -> str:
    """The name of the folder of the states of a save."""
    return f"state-{save}"


@dataclass(frozen=True)
class Index:
    """An index: the file of each tensor, and metadata whose fields of checkpoints have the right types."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def save(self) -> str | None:
        """The identity of the save that wrote it; None for an index of another tool."""
        return self.metadata.get(SAVE)

    def open(self) -> dict[str, TensorFile]:
        """All files, by name.

        Raises FileNotFoundError if some do not exist, ValueError if a name leaves the folder, a file is damaged, of
        another save, or holds other tensors than the index says.
        """
        paths: dict[str, Path] = {}
        for tensor, name in self.weight_map.items():
            if name not in paths:
                paths[name] = inside(self.path.parent, name, f"{self.path}: weight_map: {shown(tensor)}")
        if absent := sorted(name for name, path in paths.items() if not os.path.exists(path)):
            raise FileNotFoundError(f"{self.path} names files that do not exist: {', '.join(absent)}")
        files = {name: TensorFile(path) for name, path in sorted(paths.items())}
        if lost := [f"{tensor} in {name}" for tensor, name in self.weight_map.items() if tensor not in files[name]]:
            raise ValueError(f"{self.path} names tensors that the files do not hold: {', '.join(lost)}")
        for name, file in files.items() if self.save is not None else ():
            file.check_save(self.save)
            if more := [tensor for tensor in file if self.weight_map.get(tensor) != name]:
                raise ValueError(f"{file.path}: holds {', '.join(more)}, which {self.path} does not expect there")
        return files


def read_index(path: Path) -> Index:
    """Reads an index. Raises FileNotFoundError without one, ValueError that names the field if it is damaged."""
    found = parse_object(read_regular(path), path, "index")
    weight_map, metadata = found.get("weight_map"), found.get("metadata", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: expected an index with a weight_map, got {shown(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(f"{path}: weight_map: {shown(name)}: expected a file name, got {shown(file)}")
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: metadata: expected an object, got {shown(metadata)}")
    for key, (form, pattern) in _FORMS.items():
        value = metadata.get(key)
        if not metadata.keys().isdisjoint(_FORMS) and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ValueError(f"{path}: metadata: {key}: expected {form}, got {shown(value)}")
    return Index(path, weight_map, metadata)
