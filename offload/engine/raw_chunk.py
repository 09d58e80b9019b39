"""Raw chunks (``input_fn``): the first shard computes its input from them, in forward and again in a recomputation.

The computed input (decoded images, for example) may be far larger than the raw chunk. It exists only while its cell
runs; random numbers drawn for it are a part of the cell, and are replayed with it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipe.nested import map_tensors, parts_of, tensors_in

__all__ = ["LazyInput", "RawChunk", "as_call", "tensors_inside", "versions_of"]


class _Version:
    """A tensor inside an object and its version counter; equal to those of the same tensor, unchanged."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


def tensors_inside(leaf: Any) -> list[Tensor]:
    """The tensors in an object that is no registered container (a dataclass)."""
    if isinstance(leaf, (Tensor, torch.nn.Module, LazyInput, type)):
        return []
    members = [getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)] if dataclasses.is_dataclass(leaf) else []
    return list(tensors_in([*members, *getattr(leaf, "__dict__", {}).values()]))


def versions_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What tells that tensors of these leaves, or in objects among them, were changed or replaced."""
    versions: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            versions += [] if leaf.is_inference() else [leaf._version]
        else:
            versions += map(_Version, tensors_inside(leaf))
    return tuple(versions)


class LazyInput(ABC):
    """An input of the first shard that is computed when it is needed. One leaf to the engine."""

    #: Rows of the input.
    rows: int
    #: Those that it is computed from, as far as they are known.
    tensors: Sequence[Tensor] = ()

    @abstractmethod
    def entering(self, bring: Callable[[Tensor], Tensor]) -> Any:
        """(args, kwargs) of the first layer; or a function that returns them, called inside the cell.

        ``bring`` copies a tensor to the compute device.
        """


class RawChunk(LazyInput):
    """A chunk, which the engine does not move, cast or differentiate; its function makes a tensor or (args, kwargs)."""

    def __init__(self, i: int, value: Any, input_fn: Callable[[Any], Any]) -> None:
        self._i = i
        self._value = value
        self._input_fn = input_fn
        self.tensors = tensors_in(value)
        self._versions = versions_of(self.tensors)
        #: Largest number of rows of its tensors; 1 if there is none.
        self.rows = max((tensor.size(0) for tensor in self.tensors if tensor.dim()), default=1)

    def entering(self, bring: Callable[[Tensor], Tensor]) -> Any:
        """A function, so that it is replayed with the cell."""
        return partial(self.call, bring)

    def call(self, bring: Callable[[Tensor], Tensor]) -> Any:
        """(args, kwargs) for the first layer, with all tensors on the compute device."""
        if self._versions != versions_of(self.tensors):
            raise RuntimeError(
                f"an input of the model (chunk {self._i}) was changed in place between the forward and its backward; "
                f"clone it before changing it"
            )
        own = {part.untyped_storage().data_ptr() for tensor in self.tensors for part in parts_of(tensor)}

        def brought(tensor: Tensor) -> Tensor:
            moved = bring(tensor)
            # Without this, a first layer that writes its input in place would write the caller's tensor.
            shares = any(part.untyped_storage().data_ptr() in own for part in parts_of(moved))
            return moved.clone() if shares else moved

        return map_tensors(brought, as_call(self._i, self._input_fn(self._value)))


def as_call(i: int, chunk: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Chunk ``i`` as arguments and keyword arguments of the first layer."""
    if isinstance(chunk, Tensor):
        return (chunk,), {}
    if isinstance(chunk, tuple) and len(chunk) == 2:
        args, kwargs = chunk
        if isinstance(args, (tuple, list)) and isinstance(kwargs, dict):
            return tuple(args), kwargs
    raise TypeError(f"expected a tensor or (args, kwargs) as chunk {i}, got {type(chunk).__name__}")
