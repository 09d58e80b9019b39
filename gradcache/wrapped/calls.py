"""Records the calls of streamed models inside a tower: their inputs, their outputs, and the gradients of both.

The outputs are returned each time the forward around the call is repeated. Each time they begin a new graph, and the
gradients that are computed there are summed until all users of the outputs have run backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradcache import representations
from gradcache.autograd_node import Gradients, with_backward
from gradcache.wrapped.call_state import CallState
from pipe.nested import TreeSpec, flatten, unflatten
from pipe.phony import get_phony

__all__ = ["Call", "Receiver"]


class Receiver:
    """An autograd node that stores the gradients of some tensors without changing their memory layout.

    A leaf would be nearly the same, but autograd copies a leaf's gradient into the leaf's own layout, and the next
    operation would then sum it in another order than in the plain model.
    """

    def __init__(self) -> None:
        #: One for each leaf of :meth:`attach`, None for a leaf without a gradient.
        self.gradients: list[Tensor | None] = []

    def attach(self, leaves: Sequence[Any], wanted: Sequence[bool], *, copy: bool) -> list[Any]:
        """Detached ``leaves``, of which those that are ``wanted`` become outputs of the node; or copies of them all."""
        self.gradients = [None] * len(leaves)
        positions = [k for k, wants in enumerate(wanted) if wants]
        pairs = zip(leaves, wanted, strict=True)
        attached = [x.clone() if copy and isinstance(x, Tensor) and not wants else x for x, wants in pairs]
        values = [leaves[k].clone() if copy else leaves[k].detach() for k in positions]

        def store(gradients: Gradients) -> Gradients:
            for k, gradient in zip(positions, gradients, strict=True):
                self.gradients[k] = gradient
            return (None,)

        if values:
            with torch.enable_grad():
                values = with_backward(values, [get_phony(values[0].device, requires_grad=True)], store)
        for k, value in zip(positions, values, strict=True):
            attached[k] = value
        return attached


class Call:
    """A call of a streamed model, at which a forward is suspended until it has run.

    ``inputs`` are the flat arguments of all micro-batches; ``requires`` tells which of them need a gradient.
    """

    def __init__(self, model: Any, inputs: list[Any], spec: TreeSpec, requires: list[bool], state: CallState) -> None:
        self.model = model
        self.input_spec = spec
        self.requires = requires
        #: The state around the call, until it runs.
        self.state = state
        self._inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._versions = _versions_of(inputs)
        #: Whether it ran with gradients.
        self.records = False
        #: Receives the gradients of the inputs.
        self.entered = Receiver()
        #: The outputs, flat and detached.
        self.outputs: list[Any] = []
        self._spec: TreeSpec | None = None
        #: Number of leaves of the output of each micro-batch.
        self._leaves: list[int] = []
        self._differentiable: list[bool] = []
        self._gradients: list[Tensor | None] = []

    @property
    def overwritten(self) -> bool:
        """Whether an argument was written in place since the call."""
        return _versions_of(self._inputs) != self._versions

    def enter(self) -> list[Any]:
        """The micro-batches for the run of the call, which is about to begin."""
        self.records = torch.is_grad_enabled()
        del self.state
        inputs, self._inputs = self._inputs, []
        micro_batches: list[Any] = unflatten(self.entered.attach(inputs, self.requires, copy=False), self.input_spec)
        return micro_batches

    def fill(self, outputs: Sequence[Any], differentiable: Sequence[bool]) -> None:
        """Stores the outputs of all micro-batches, and which of their leaves need a gradient."""
        self.outputs, self._spec = flatten(list(outputs))
        self._leaves = [len(flatten(output)[0]) for output in outputs]
        self._differentiable = list(differentiable)
        self._gradients = [None] * len(self.outputs)

    def attach(self) -> tuple[list[Any], Receiver]:
        """Copies of the outputs, with a new graph if they need a gradient; and the receiver of that gradient."""
        assert self._spec is not None
        receiver, records = Receiver(), torch.is_grad_enabled()
        wanted = [wants and records for wants in self._differentiable]
        return unflatten(receiver.attach(self.outputs, wanted, copy=True), self._spec), receiver

    def collect(self, receiver: Receiver) -> None:
        """Adds the gradients of a receiver of :meth:`attach`."""
        for k, gradient in enumerate(receiver.gradients):
            before = self._gradients[k]
            self._gradients[k] = gradient if before is None else before if gradient is None else before + gradient

    def take_gradients(self) -> list[Any]:
        """The collected gradients of the outputs, one per micro-batch (None if it has none). Drops them.

        A list of the gradient of each leaf: containers of some libraries forget members that are None.
        """
        gradients, self._gradients = iter(self._gradients), []
        parts = [list(itertools.islice(gradients, leaves)) for leaves in self._leaves]
        return [part if representations.has_gradient(part) else None for part in parts]


def _versions_of(leaves: Sequence[Any]) -> list[int]:
    """The version counters of the tensors that have one (all except inference tensors)."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
