"""The parts of checkpoints that several processes write together, by ``torch.distributed.checkpoint`` (DCP).

Each rank writes the rows that it stores. Any number of processes reads them: each tensor into the rows of the reader.
Names are those of ``get_model_state_dict`` and ``get_optimizer_state_dict``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.mesh.ranks import Ranks

__all__ = ["StoredParts", "named_states", "on_first", "ranks_of", "write_parts"]

T = TypeVar("T")
_MODEL, _STATE = "model.", "optimizer.state."


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that store an ``OffloadModel`` together; None for any other model."""
    executor = getattr(model, "_executor", None)
    ranks: Ranks | None = None if executor is None else executor.public.ranks
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
) -> None:
    """Writes tensors of a model, and ``states`` of its optimizer, as "state.<number>.<name>", into a folder."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
    for full, tensor in states.items():
        _, number, key = full.split(".", 2)
        tensors[f"{_STATE}{names[int(number)]}.{key}"] = tensor
    with _one_error("write"):
        save(tensors, storage_writer=FileSystemWriter(folder), process_group=ranks.everybody)


@contextlib.contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Raises RuntimeError for the exception of DCP, which is none that programs catch."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
        raise RuntimeError(f"the ranks of the mesh cannot {what} the checkpoint: {failures}") from error


class StoredParts:
    """What :func:`write_parts` wrote into a folder; ``names`` as given to it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._reader = FileSystemReader(folder)
        entries = self._reader.read_metadata().state_dict_metadata
        self._entries: dict[str, Any] = {name: entry for name, entry in entries.items() if hasattr(entry, "size")}
        self._names = names
        #: Names of the tensors of the model.
        self.model = [name.removeprefix(_MODEL) for name in self._entries if name.startswith(_MODEL)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the model."""
        return tuple(self._entries[_MODEL + name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor of the model."""
        dtype: torch.dtype = self._entries[_MODEL + name].properties.dtype
        return dtype

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
                alike = size == parameter.shape and len(size) > 0
                state = torch.zeros_like(parameter, dtype=dtype) if alike else torch.zeros(size, dtype=dtype)
                found[full] = states.setdefault(number, {})[full.removeprefix(prefix)] = state.detach()
        with contextlib.ExitStack() as stack:
            if ranks is None:
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            group = None if ranks is None else ranks.everybody
            stack.enter_context(_one_error("read"))
            load(found, storage_reader=self._reader, process_group=group, no_dist=ranks is None)
        return states
