"""The layers of a model by the names, shapes and types of their parameters, without values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.planning.partition import aligned

__all__ = ["Layer", "Outline", "ParameterShape"]


@dataclass(frozen=True)
class ParameterShape:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in storage."""
        return self.elements * self.dtype.itemsize

    def slot_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes in a slot, floating-point parameters as ``dtype``."""
        cast = dtype is not None and self.dtype.is_floating_point
        return aligned(self.elements * (dtype if cast and dtype is not None else self.dtype).itemsize)


@dataclass(frozen=True)
class Layer:
    """One of the layers that are passed to OffloadModel."""

    name: str
    own: tuple[ParameterShape, ...]
    #: Parameters that an earlier layer stores.
    borrowed: tuple[ParameterShape, ...] = ()
    #: Whether it looks up rows of its matrices by number.
    looks_up: bool = False
    #: The modules that it consists of, where it is more than one.
    parts: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """The parameters that the layer uses, also those that an earlier one stores."""
        return (*self.own, *self.borrowed)

    def slot_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes in a slot."""
        return sum(p.slot_bytes(dtype) for p in self.parameters)


@dataclass
class Outline:
    """What is known of a model."""

    layers: Sequence[Layer]
    #: What was assumed, each in a sentence.
    assumptions: list[str] = field(default_factory=list)
    #: The layers themselves on the meta device, where they can run; and whether neighbours may share a shard.
    modules: Sequence[nn.Module] | None = None
    sequential: bool = False
    #: Lines of Python that make ``layers``.
    preparation: Sequence[str] = ()
    #: The files of the weights, if there are any; and whether a configuration beside them names the model's class.
    path: str | None = None
    has_class: bool = False
    #: Width of boundaries and of the output, where a configuration says so.
    width: int | None = None

    @property
    def elements(self) -> int:
        """Parameters of the model; a tied one counts once."""
        return sum(p.elements for layer in self.layers for p in layer.own)
