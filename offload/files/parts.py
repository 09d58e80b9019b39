"""The parts of checkpoints that several processes write together, by ``torch.distributed.checkpoint`` (DCP).

Each rank writes the rows that it stores. Any number of processes reads them: each tensor into the rows of the reader.
Names are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``. What DCP says of the parts is kept with
the rest of a checkpoint, beside the pickle that DCP itself reads: here nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.files.tensor_file import WINDOW_BYTES, ChecksumError
from offload.files.untrusted import inside, naming, open_regular, shown
from offload.mesh.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

__all__ = ["StoredParts", "named_states", "on_all", "ranks_of", "write_parts"]

T = TypeVar("T")
_MODEL, _STATE = "model.", "optimizer.state."
_DATA = re.compile(r"__(\d+)_\d+\.distcp")


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that store an ``OffloadModel`` together; None for any other model."""
    homes = getattr(model, "_homes", None)
    ranks: Ranks | None = None if homes is None else homes.public.ranks
    return ranks


def on_all(ranks: Ranks | None, work: Callable[[], T], *, first: bool = False) -> list[T]:
    """The results of all ranks, or of the ``first`` one, which alone does the work; without ranks, of this process.

    If one raises, all raise: the others ValueError if it does, else RuntimeError.
    """
    if ranks is None:
        return [work()]
    error: BaseException | None = None
    result: Any = None
    if not first or ranks.number == 0:
        try:
            result = work()
        except BaseException as raised:
            error = raised
    told = None if error is None else f"{type(error).__name__}: {error}"
    found = ranks.exchange((told, isinstance(error, ValueError), result))
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
) -> dict[str, Any]:
    """Writes tensors of a model, and ``states`` of its optimizer, as "state.<number>.<name>", into a folder.

    Returns what :class:`StoredParts` needs to read them: names, places, and size and checksum of each file, which each
    rank reads once more for that.
    """
    from torch.distributed import get_rank
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
    for full, tensor in states.items():
        _, number, key = full.split(".", 2)
        tensors[f"{_STATE}{names[int(number)]}.{key}"] = tensor
    with _one_error("write", folder, RuntimeError):
        written = save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.everybody)
    places = {(index.fqn, index.offset): info for index, info in (written.storage_data or {}).items()}
    entries: dict[str, Any] = {}
    for name, entry in written.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        infos = [(each, places[name, each.offsets]) for each in entry.chunks]
        chunks = [
            [[*each.offsets], [*each.sizes], info.relative_path, info.offset, info.length] for each, info in infos
        ]
        entries[name] = [[*entry.size], entry.properties.dtype, chunks]

    def sums() -> dict[str, list[int]]:
        number = get_rank(ranks.everybody)
        own = [name for name in os.listdir(folder) if (m := _DATA.fullmatch(name)) and int(m.group(1)) == number]
        return {name: _sum_of(folder / name) for name in own}

    found = {name: found for each in on_all(ranks, sums) for name, found in each.items()}
    return {"names": names, "entries": entries, "sums": found}


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


@dataclass(frozen=True)
class _Place:
    """Where a part of a tensor is, as the reader of DCP takes it: bytes of a file."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def _described_in(found: Any) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, _Place]]:
    """The tensors that :func:`write_parts` described, and where their parts are.

    Raises ValueError, and other errors, for what it never writes.
    """
    from torch.distributed.checkpoint import metadata as m

    entries: dict[str, m.TensorStorageMetadata] = {}
    places: dict[m.MetadataIndex, _Place] = {}
    for name, (size, dtype, parts) in found.items():
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"{shown(name)}: expected a type, got {shown(dtype)}")
        chunks = []
        for offsets, sizes, file, offset, length in parts:
            if not isinstance(file, str) or not _DATA.fullmatch(file):
                raise ValueError(f"{name}: expected a file of parts, got {shown(file)}")
            chunks.append(m.ChunkStorageMetadata(_sizes(offsets), _sizes(sizes)))
            places[m.MetadataIndex(name, chunks[-1].offsets)] = _Place(file, *_sizes([offset, length]))
        entries[name] = m.TensorStorageMetadata(m.TensorProperties(dtype), _sizes(size), chunks)
    return entries, places


def _sizes(found: Any) -> torch.Size:
    if not isinstance(found, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 62 for n in found):
        raise ValueError(f"expected sizes, got {shown(found)}")
    return torch.Size(found)


class StoredParts:
    """What :func:`write_parts` wrote into a folder; ``described``: what it returned.

    Raises ValueError, on all ranks, if a file is damaged.
    """

    def __init__(self, folder: Path, described: Any, ranks: Ranks | None = None) -> None:
        self._folder = folder
        on_all(ranks, lambda: self._verify(described, ranks))
        #: Names of the tensors of the model.
        self.model = [name.removeprefix(_MODEL) for name in self._entries if name.startswith(_MODEL)]

    def _verify(self, described: Any, ranks: Ranks | None) -> None:
        """Compares the sums of all files, each on one rank."""
        try:
            self._names = [str(name) for name in described["names"]]
            self._entries, self._places = _described_in(described["entries"])
            sums = {name: tuple(_sizes(found)) for name, found in described["sums"].items()}
            files = {place.relative_path for place in self._places.values()}
            for name in files:
                inside(self._folder, name, "sums")
                sums[name]
        except Exception as error:  # It may be anything, in any place.
            raise ValueError(
                f"{self._folder / 'state.pt'}: parts: expected what ranks wrote, got {type(error).__name__}: {error}"
            ) from error
        mine = sorted(files) if ranks is None else sorted(files)[ranks.number :: ranks.total]
        for name in mine:
            if (found := tuple(_sum_of(self._folder / name))) != sums[name]:
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
        return self._entries[_MODEL + name].properties.dtype

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
                size, dtype = self._entries[full].size, self._entries[full].properties.dtype
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
        """A reader of DCP that is given what is known of the parts, in place of unpickling it."""
        from torch.distributed.checkpoint import metadata as m
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        described: dict[str, m.STORAGE_TYPES] = {**self._entries}
        places = self._places

        class Reader(FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> m.Metadata:
                return m.Metadata(described, storage_data=places, storage_meta=m.StorageMeta(load_id=self.load_id))

        return Reader(self._folder)
