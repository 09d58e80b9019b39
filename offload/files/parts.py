"""The parts of checkpoints that several processes write together, by ``torch.distributed.checkpoint`` (DCP).

Each rank writes the rows that it stores. Any number of processes reads them: each tensor into the rows of the reader.
Names are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.tensor_file import WINDOW_BYTES, ChecksumError
from offload.files.untrusted import inside, naming, open_regular, read_regular, shown
from offload.mesh.ranks import Ranks

__all__ = ["StoredParts", "named_states", "on_first", "ranks_of", "write_parts"]

T = TypeVar("T")
_MODEL, _STATE = "model.", "optimizer.state."
_METADATA = ".metadata"
_DATA = re.compile(r"__(\d+)_\d+\.distcp")
#: Most bytes of the metadata: some millions of parts.
_MOST_METADATA = 1 << 30


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that store an ``OffloadModel`` together; None for any other model."""
    homes = getattr(model, "_homes", None)
    ranks: Ranks | None = None if homes is None else homes.public.ranks
    return ranks


def on_first(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """The result of ``work``, which the first rank does; without ranks, this process. If it raises, all raise."""
    if ranks is None:
        return work()
    error: BaseException | None = None
    result: Any = None
    if ranks.number == 0:
        try:
            result = work()
        except BaseException as raised:
            error = raised
    failed, result = ranks.exchange((None if error is None else f"{type(error).__name__}: {error}", result))[0]
    if error is not None:
        raise error
    if failed is not None:
        raise RuntimeError(f"rank 0 of the mesh failed to write the checkpoint: {failed}")
    return result  # type: ignore[no-any-return]


def on_all(ranks: Ranks | None, work: Callable[[], T]) -> list[T]:
    """The results of all ranks. If one raises, all raise: the others what it raised, if it is of a checkpoint."""
    if ranks is None:
        return [work()]
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    found = ranks.exchange((None if error is None else str(error), isinstance(error, ValueError), result))
    if error is not None:
        raise error
    for number, (failed, damaged, _) in enumerate(found):
        if failed is not None:
            raise (ValueError if damaged else RuntimeError)(f"rank {number} of the mesh failed: {failed}")
    return [result for _, _, result in found]


def named_states(model: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """For each parameter of an optimizer, in the order of its ``state_dict()``, the name of its states.

    Raises ValueError for a state of a parameter in parts that does not say which part it is.
    """
    if optimizer is None:
        return []
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        for key, value in optimizer.state.get(p, {}).items() if hasattr(p, "placements") else ():
            if isinstance(value, Tensor) and value.dim() and not hasattr(value, "placements"):
                raise ValueError(
                    f"expected states of the shape of their parameters, got {key} of shape {tuple(value.shape)} for a "
                    f"DTensor of shape {tuple(p.shape)}: of the values of all ranks, those of one would be saved"
                )
    return [names.get(id(p), str(number)) for number, p in enumerate(parameters)]


def write_parts(
    folder: Path, model: Mapping[str, Tensor], states: Mapping[str, Tensor], names: list[str], ranks: Ranks
) -> dict[str, list[int]]:
    """Writes tensors of a model, and ``states`` of its optimizer, as "state.<number>.<name>", into a folder.

    Returns size and checksum of each file, which each rank reads once more for that.
    """
    from torch.distributed import get_rank
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
    for full, tensor in states.items():
        _, number, key = full.split(".", 2)
        tensors[f"{_STATE}{names[int(number)]}.{key}"] = tensor
    with _one_error("write", folder, RuntimeError):
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.everybody)

    def sums() -> dict[str, list[int]]:
        number = get_rank(ranks.everybody)
        own = [name for name in os.listdir(folder) if (m := _DATA.fullmatch(name)) and int(m.group(1)) == number]
        return {name: _sum_of(folder / name) for name in own + [_METADATA] * (ranks.number == 0)}

    return {name: found for each in on_all(ranks, sums) for name, found in each.items()}


def _sum_of(path: Path) -> list[int]:
    """Size and checksum of a file."""
    fd, size, value = open_regular(path), 0, 0
    try:
        with naming(path):
            while part := os.read(fd, WINDOW_BYTES):
                size, value = size + len(part), zlib.crc32(part, value)
    finally:
        os.close(fd)
    return [size, value]


@contextlib.contextmanager
def _one_error(what: str, folder: Path, kind: type[Exception]) -> Iterator[None]:
    """Raises an error for the exception of DCP, which is none that programs catch."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise kind(f"the ranks of the mesh cannot {what} the checkpoint in {folder}: {failures}") from error


class _Record:
    """Stands for an object in the metadata of DCP: what it would be made of, without any code of its class."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataReader(pickle.Unpickler):
    """Reads the metadata of DCP: names of its classes give records, those of torch's types the types, others raise."""

    _CLASSES = (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout"),
        *("PosixPath", "WindowsPath", "PurePosixPath"),
    )

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # Of this reader only: what a file sets on a class ends with it.
        self._records = {name: type(name, (_Record,), {}) for name in self._CLASSES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        ours = module.startswith(("torch.distributed.checkpoint.", "pathlib")) or module == "torch.serialization"
        if ours and name in self._records:
            return self._records[name]
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


@dataclass(frozen=True)
class _Chunk:
    """Where a part of a tensor is: as many rows as ``sizes`` says, in bytes of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True)
class _Entry:
    """A tensor in the metadata."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_Chunk]


def _entries_in(data: bytes, path: Path) -> dict[str, _Entry]:
    """The tensors in the metadata of DCP. Raises ValueError unless parts of rows cover each of them, each row once."""
    try:
        found = _MetadataReader(data).load().state
        places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for index, info in found["storage_data"].items():
            if index.state["offset"] is not None:
                places[_name(index.state["fqn"]), _sizes(index.state["offset"])] = info.state
        entries: dict[str, _Entry] = {}
        for name, entry in found["state_dict_metadata"].items():
            if not isinstance(entry.state, dict) or "size" not in entry.state:
                continue  # not a tensor
            dtype, chunks = entry.state["properties"].state[0], []
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name}: expected a type, got {shown(dtype)}")
            for each in entry.state["chunks"]:
                offsets, sizes = _sizes(each.state["offsets"]), _sizes(each.state["sizes"])
                info = places[_name(name), offsets]
                if not isinstance(info["relative_path"], str) or not _DATA.fullmatch(info["relative_path"]):
                    raise ValueError(f"{name}: expected a file of parts, got {shown(info['relative_path'])}")
                if info.get("transform_descriptors"):
                    raise ValueError(f"{name}: expected plain bytes, got {shown(info['transform_descriptors'])}")
                begin, length = _sizes([info["offset"], info["length"]])
                chunks.append(_Chunk(offsets, sizes, info["relative_path"], begin, length))
            entries[name] = _Entry(_sizes(entry.state["size"]), dtype, chunks)
            _check_cover(name, entries[name])
    except Exception as error:  # What a pickle builds may be anything, in any place.
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path}: expected the metadata of parts that ranks wrote, got a damaged file: {type(error).__name__}: "
            f"{reason}"
        ) from error
    return entries


def _name(found: Any) -> str:
    if not isinstance(found, str):
        raise ValueError(f"expected a name, got {shown(found)}")
    return found


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in found):
        raise ValueError(f"expected sizes, got {shown(found)}")
    return tuple(found)


def _check_cover(name: str, entry: _Entry) -> None:
    if math.prod(max(1, n) for n in entry.size) >= 1 << 62:
        raise ValueError(f"{name}: expected a size that fits an address, got {entry.size}")
    end = 0
    for chunk in sorted(entry.chunks, key=lambda chunk: (chunk.offsets, chunk.sizes)):
        rest = (0,) * len(entry.size[1:])
        if chunk.offsets[1:] != rest or chunk.sizes[1:] != entry.size[1:] or len(chunk.sizes) != len(entry.size):
            raise ValueError(f"{name}: expected rows of a tensor of size {entry.size}, got {chunk}")
        if not entry.size:
            end += 1
        elif chunk.offsets[0] != end:
            raise ValueError(f"{name}: expected a part from row {end}, got {chunk}")
        else:
            end += chunk.sizes[0]
    if end != (entry.size[0] if entry.size else 1):
        raise ValueError(f"{name}: expected parts of all rows of a tensor of size {entry.size}, got {end}")


class StoredParts:
    """What :func:`write_parts` wrote into a folder; ``names`` as given to it, ``sums`` as it returned them.

    Raises ValueError, on all ranks, if a file is damaged; what releases without sums wrote is read without them.
    """

    def __init__(
        self, folder: Path, names: list[str], sums: Mapping[str, list[int]] | None, ranks: Ranks | None = None
    ) -> None:
        self._folder, self._names = folder, names
        on_all(ranks, lambda: self._verify(sums, ranks))
        #: Names of the tensors of the model.
        self.model = [name.removeprefix(_MODEL) for name in self._entries if name.startswith(_MODEL)]

    def _verify(self, sums: Mapping[str, list[int]] | None, ranks: Ranks | None) -> None:
        """Reads the metadata, and compares the sums of all files, each on one rank."""
        path = self._folder / _METADATA
        self._entries = _entries_in(read_regular(path, _MOST_METADATA), path)
        ends: dict[str, int] = {}
        for entry in self._entries.values():
            for chunk in entry.chunks:
                end = chunk.offset + chunk.length
                ends[chunk.relative_path] = max(end, ends.get(chunk.relative_path, 0))
        for name, end in ends.items():
            fd = open_regular(inside(self._folder, name, str(path)))
            try:
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
            if size < end:
                raise ValueError(f"{self._folder / name}: expected {end:,} bytes, got {size:,}; it is not complete")
        if sums is None:
            return
        if lost := sorted({*ends, _METADATA} - sums.keys()):
            raise ValueError(f"{self._folder}: {', '.join(lost)} belong to another save, and nothing was loaded")
        mine = sorted(sums) if ranks is None else sorted(sums)[ranks.number :: ranks.total]
        for name in mine:
            found = _sum_of(inside(self._folder, name, "sums"))
            if found != sums[name]:
                raise ChecksumError(
                    f"{self._folder / name}: the bytes are not those that were written (size and checksum {found}, "
                    f"expected {sums[name]}), and nothing was loaded. Restore the file from a copy, or load another "
                    f"checkpoint"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the model."""
        return self._entries[_MODEL + name].size

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor of the model."""
        return self._entries[_MODEL + name].dtype

    def read(
        self, model: Mapping[str, Tensor], optimizer: Optimizer | None, ranks: Ranks | None
    ) -> dict[int, dict[str, Tensor]]:
        """Reads the tensors of a model into place; returns the states of each parameter of its optimizer.

        States of a parameter's shape are cut as it is.
        """
        from torch.distributed.checkpoint.state_dict_loader import load

        found = {_MODEL + name: tensor for name, tensor in model.items()}
        states: dict[int, dict[str, Tensor]] = {}
        parameters = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        for number, (name, parameter) in enumerate(zip(self._names, parameters, strict=False)):
            prefix = f"{_STATE}{name}."
            for full in [e for e in self._entries if e.startswith(prefix) and "." not in e.removeprefix(prefix)]:
                size, dtype = self._entries[full].size, self._entries[full].dtype
                alike = size == tuple(parameter.shape) and len(size) > 0
                state = torch.zeros_like(parameter, dtype=dtype) if alike else torch.zeros(size, dtype=dtype)
                found[full] = states.setdefault(number, {})[full.removeprefix(prefix)] = state.detach()
        with contextlib.ExitStack() as stack:
            if ranks is None:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            group = None if ranks is None else ranks.everybody
            stack.enter_context(_one_error("read", self._folder, ValueError))
            load(found, storage_reader=self._reader(), process_group=group, no_dist=ranks is None)
        return states

    def _reader(self) -> Any:
        """A reader of DCP that is given the metadata, in place of unpickling it."""
        from torch.distributed.checkpoint import metadata as m
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        described: dict[str, m.STORAGE_TYPES] = {
            name: m.TensorStorageMetadata(
                m.TensorProperties(entry.dtype),
                torch.Size(entry.size),
                [m.ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in entry.chunks],
            )
            for name, entry in self._entries.items()
        }
        stored = {
            m.MetadataIndex(name, each.offsets): each for name, entry in self._entries.items() for each in entry.chunks
        }

        class Reader(FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> m.Metadata:
                return m.Metadata(described, storage_data=stored, storage_meta=m.StorageMeta(load_id=self.load_id))

        return Reader(self._folder)
