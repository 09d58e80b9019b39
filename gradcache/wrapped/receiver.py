"""An autograd node that stores the gradients of some tensors without changing their memory layout.

A leaf would be nearly the same, but autograd copies a leaf's gradient into the leaf's own layout, and the next
operation would then sum it in another order than in the plain model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipe.phony import get_phony

__all__ = ["Receiver"]


class Receiver:
    """Stores the gradients of one set of tensors."""

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
