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
from torch.autograd.function import once_differentiable

from gradcache.wrapped.call_state import CallState
from pipe.nested import TreeSpec, flatten, unflatten
from pipe.phony import get_phony

__all__ = ["Call", "CallResult", "Receiver", "versions_of"]


class Receiver:
    """An autograd node that stores the gradients of some tensors without changing their memory layout.

    A leaf would be nearly the same, but autograd copies a leaf's gradient into the leaf's own layout, and the next
    operation would then sum it in another order than in the plain model.
    """

    def __init__(self) -> None:
        #: One for each tensor of :meth:`attach`, None for a tensor without a gradient.
        self.gradients: list[Tensor | None] = []

    def attach(self, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
        """The same values as outputs of a node that stores their gradients here; ``copy``: with memory of their own."""
        self.gradients = [None] * len(tensors)
        if not tensors:
            return []
        with torch.enable_grad():
            phony = get_phony(tensors[0].device, requires_grad=True)
            values = [tensor.detach() for tensor in tensors]
            return list(_Receive.apply(self, copy, phony, *values))  # type: ignore[no-untyped-call]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, receiver: Receiver, copy: bool, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.receiver = receiver
        return tuple(tensor.clone() if copy else tensor.detach() for tensor in tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.receiver.gradients = list(gradients)
        return (None,) * (3 + len(gradients))


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
        records = torch.is_grad_enabled()
        wanted = [leaf for leaf, wants in zip(self.outputs, self.differentiable, strict=True) if wants and records]
        attached = iter(receiver.attach(wanted, copy=True))
        leaves = [
            next(attached) if wants and records else leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
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
