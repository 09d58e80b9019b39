"""The parts of checkpoints that several processes write together, by ``torch.distributed.checkpoint`` (DCP).

Each rank writes the rows that it stores. Any number of processes reads them: each tensor into the rows of the reader.
Names are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``. What DCP says of the parts is in
``parts.pt``, beside the pickle that DCP itself reads: no code of a checkpoint runs here.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.mesh.ranks import Ranks
from offload.untrusted import sum_of
from pipe.torch_private.distributed import metadata_types

__all__ = ["PARTS", "StoredParts", "named_states", "on_all", "ranks_of", "write_parts"]

T = TypeVar("T")
_MODEL, _STATE = "model.", "optimizer.state."
#: The file of what DCP says of the parts.
PARTS = "parts.pt"


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
) -> tuple[bytes, dict[str, str]]:
    """Writes tensors of a model, and ``states`` of its optimizer, as "state.<number>.<name>", into a folder.

    Returns what :data:`PARTS` is to hold; and size and checksum of each file, which its rank reads once more for that.
    """
    from torch.distributed import get_rank
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
    for full, tensor in states.items():
        _, number, key = full.split(".", 2)
        tensors[f"{_STATE}{names[int(number)]}.{key}"] = tensor
    with _one_error("write", folder, RuntimeError):
        written = save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.everybody)

    def sums() -> dict[str, str]:
        return {path.name: sum_of(path) for path in folder.glob(f"__{get_rank(ranks.everybody)}_*.distcp")}

    found = {name: sum for each in on_all(ranks, sums) for name, sum in each.items()}
    buffer = io.BytesIO()
    torch.save((names, Metadata(written.state_dict_metadata, storage_data=written.storage_data)), buffer)
    return buffer.getvalue(), found


@contextlib.contextmanager
def _one_error(what: str, folder: Path, kind: type[Exception]) -> Iterator[None]:
    """Raises an error for the exception of DCP, which is none that programs catch."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise kind(f"the ranks of the mesh cannot {what} the checkpoint in {folder}: {failures}") from error


class StoredParts:
    """What :func:`write_parts` wrote into a folder, whose ``files`` were verified. Raises ValueError else."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self._folder = folder
        try:
            with torch.serialization.safe_globals(metadata_types()):
                self._names, self._metadata = torch.load(folder / PARTS, weights_only=True)
            self._entries: dict[str, Any] = self._metadata.state_dict_metadata
            unknown = {place.relative_path for place in self._metadata.storage_data.values()} - {*files}
        except Exception as error:  # It may be anything, in any place.
            raise ValueError(
                f"{folder / PARTS}: expected what ranks wrote, got {type(error).__name__}: {error}"
            ) from error
        if unknown:
            raise ValueError(f"{folder / PARTS}: names files that are not of the checkpoint: {', '.join(unknown)}")
        #: The tensors of the model, on the meta device.
        self.model = {
            name.removeprefix(_MODEL): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._entries.items()
            if name.startswith(_MODEL)
        }

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
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader: Any = FileSystemReader(self._folder)
        reader.read_metadata = lambda *args, **kwargs: self._metadata
        return reader
