"""The index of safetensors files: all of them fit it and are of one save, or none is used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offload.files.tensor_file import StoredTensor, open_tensors
from offload.untrusted import inside, read_object, shown, sum_of, sum_of_values

__all__ = ["CRC", "FILES", "INDEX", "SAVE", "ChecksumError", "Index", "read_index"]

#: The name of the index of a checkpoint.
INDEX = "model.safetensors.index.json"

#: In the metadata of the index of a checkpoint: the identity of the save; size and checksum of each of its files; and a
#: checksum of all else in the index.
SAVE, FILES, CRC = "gradstream_save", "gradstream_files", "gradstream_crc32"


class ChecksumError(ValueError):
    """The bytes of a file are not those that were written."""


@dataclass(frozen=True)
class Index:
    """An index: the file of each tensor, and of a checkpoint size and checksum of each file."""

    path: Path
    weight_map: dict[str, str]
    #: The identity of the save that wrote it; None for an index of another tool.
    save: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def verify(self, names: Iterable[str]) -> None:
        """Reads files, and compares their sizes and checksums where these are known. Raises ChecksumError."""
        for name in names:
            path, expected = inside(self.path.parent, name, str(self.path)), self.files.get(name)
            if expected is not None and (found := sum_of(path)) != expected:
                raise ChecksumError(
                    f"{path}: the bytes are not those that were written ({found}, expected {expected}), and none of "
                    f"them was loaded. Restore the file from a copy, or load another checkpoint"
                )

    def open(self) -> dict[str, StoredTensor]:
        """The tensors of the model.

        Raises FileNotFoundError if some do not exist, ValueError if a name leaves the folder, a file is damaged, or
        does not hold what the index says.
        """
        paths: dict[str, Path] = {}
        for tensor, name in self.weight_map.items():
            if name not in paths:
                paths[name] = inside(self.path.parent, name, f"{self.path}: weight_map: {shown(tensor)}")
        if absent := sorted(name for name, path in paths.items() if not os.path.exists(path)):
            raise FileNotFoundError(f"{self.path} names files that do not exist: {', '.join(absent)}")
        files = {name: open_tensors(path) for name, path in sorted(paths.items())}
        if lost := [f"{tensor} in {name}" for tensor, name in self.weight_map.items() if tensor not in files[name]]:
            raise ValueError(f"{self.path} names tensors that the files do not hold: {', '.join(lost)}")
        return {tensor: files[name][tensor] for tensor, name in self.weight_map.items()}


def read_index(path: Path) -> Index:
    """Reads an index. Raises FileNotFoundError without one, ValueError that names the field if it is damaged."""
    found = read_object(path, "index")
    weight_map, metadata = found.get("weight_map"), found.get("metadata", {})
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: expected an index with a weight_map, got {shown(weight_map)}")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(f"{path}: weight_map: {shown(name)}: expected a file name, got {shown(file)}")
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: metadata: expected an object, got {shown(metadata)}")
    if metadata.keys().isdisjoint((SAVE, FILES, CRC)):
        return Index(path, weight_map)
    if metadata.pop(CRC, None) != sum_of_values([weight_map, metadata]):
        raise ChecksumError(
            f"{path}: the index is not the one that was written, and nothing was loaded. Restore the file from a copy, "
            f"or load another checkpoint"
        )
    return Index(path, weight_map, metadata[SAVE], metadata[FILES])
