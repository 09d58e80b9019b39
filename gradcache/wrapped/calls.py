"""The calls of streamed models that a tower makes: what was asked, what was answered, and the gradients of both sides.

An answer is given as often as the forward around it is repeated. Each time it begins a graph of its own, and gradients
that arrive there are added up until all that used the outputs has gone back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcache.wrapped.receiver import Receiver
from gradcache.wrapped.surroundings import Surroundings
from pipe.nested import TreeSpec, flatten, unflatten

__all__ = ["Answer", "Call", "versions_of"]


@dataclass(eq=False)
class Call:
    """The call of a streamed model at which a forward is suspended."""

    model: Any
    #: The arguments of all micro-batches, flat and detached.
    inputs: list[Any]
    spec: TreeSpec
    #: Which of the inputs need a gradient.
    requires: list[bool]
    surroundings: Surroundings
    versions: list[int]

    @property
    def overwritten(self) -> bool:
        """Whether an argument was written in place since the call."""
        return versions_of(self.inputs) != self.versions


@dataclass(eq=False)
class Answer:
    """What a call of a streamed model returned, and the gradients on both of its sides."""

    model: Any
    input_spec: TreeSpec
    requires: list[bool]
    records: bool
    #: Takes the gradients of those inputs that require one.
    entered: Receiver
    #: Flat and detached.
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    #: Which of the outputs need a gradient.
    differentiable: list[bool] = field(default_factory=list)
    #: Of the outputs, summed over everything that used them.
    gradients: list[Tensor | None] = field(default_factory=list)

    def fill(self, outputs: Sequence[Any], differentiable: Sequence[bool]) -> None:
        """Takes the outputs of all micro-batches."""
        self.outputs, self.spec = flatten(list(outputs))
        self.differentiable = list(differentiable)
        self.gradients = [None] * len(self.outputs)

    def give(self) -> tuple[list[Any], Receiver]:
        """The outputs, with a graph that begins here where they need a gradient; and what takes that gradient."""
        assert self.spec is not None
        receiver = Receiver()
        if not torch.is_grad_enabled():
            return unflatten([_copy(leaf) for leaf in self.outputs], self.spec), receiver
        wanted = [leaf for leaf, wants in zip(self.outputs, self.differentiable, strict=True) if wants]
        attached = iter(receiver.attach(wanted, copy=True))
        leaves = [
            next(attached) if wants else _copy(leaf)
            for leaf, wants in zip(self.outputs, self.differentiable, strict=True)
        ]
        return unflatten(leaves, self.spec), receiver

    def collect(self, receiver: Receiver) -> None:
        """Adds what arrived at a receiver of :meth:`give`."""
        positions = [k for k, wants in enumerate(self.differentiable) if wants]
        for k, gradient in zip(positions, receiver.gradients, strict=False):
            before = self.gradients[k]
            self.gradients[k] = gradient if before is None else before if gradient is None else before + gradient


def versions_of(leaves: Sequence[Any]) -> list[int]:
    """Counts of in-place changes of the tensors that count them."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
