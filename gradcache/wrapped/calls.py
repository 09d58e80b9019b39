"""Records the calls of streamed models inside a tower: their inputs, their outputs, and the gradients of both.

The outputs are returned each time the forward around the call is repeated. Each time they begin a new graph, and the
gradients that are computed there are summed until all users of the outputs have run backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcache.wrapped.call_state import CallState
from gradcache.wrapped.receiver import Receiver
from pipe.nested import TreeSpec, flatten, unflatten

__all__ = ["Call", "CallResult", "versions_of"]


@dataclass(eq=False)
class Call:
    """The pending call of a streamed model, at which a forward is suspended."""

    model: Any
    #: The arguments of all micro-batches, flat and detached.
    inputs: list[Any]
    spec: TreeSpec
    #: Which of the inputs need a gradient.
    requires: list[bool]
    state: CallState
    versions: list[int]

    @property
    def overwritten(self) -> bool:
        """Whether an argument was written in place since the call."""
        return versions_of(self.inputs) != self.versions


@dataclass(eq=False)
class CallResult:
    """The outputs of a call of a streamed model, and the gradients of its inputs and outputs."""

    model: Any
    input_spec: TreeSpec
    requires: list[bool]
    records: bool
    #: Receives the gradients of the inputs that require one.
    entered: Receiver
    #: Flat and detached.
    outputs: list[Any] = field(default_factory=list)
    spec: TreeSpec | None = None
    #: Which of the outputs need a gradient.
    differentiable: list[bool] = field(default_factory=list)
    #: Of the outputs, summed over all their users.
    gradients: list[Tensor | None] = field(default_factory=list)

    def fill(self, outputs: Sequence[Any], differentiable: Sequence[bool]) -> None:
        """Stores the outputs of all micro-batches."""
        self.outputs, self.spec = flatten(list(outputs))
        self.differentiable = list(differentiable)
        self.gradients = [None] * len(self.outputs)

    def attach(self) -> tuple[list[Any], Receiver]:
        """Copies of the outputs, with a new graph if they need a gradient; and the receiver of that gradient."""
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
        """Adds the gradients of a receiver of :meth:`attach`."""
        positions = [k for k, wants in enumerate(self.differentiable) if wants]
        for k, gradient in zip(positions, receiver.gradients, strict=False):
            before = self.gradients[k]
            self.gradients[k] = gradient if before is None else before if gradient is None else before + gradient


def versions_of(leaves: Sequence[Any]) -> list[int]:
    """The version counters of the tensors that have one (all except inference tensors)."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
