"""The receiver: an autograd node that hands the gradients of some tensors over as they were computed.

A leaf would do almost the same, but autograd stores a leaf's gradient in the leaf's own layout: that is a copy, and
what uses the gradient next would sum it in another order than the plain model does.
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
    """Takes the gradients of one set of tensors out of autograd."""

    def __init__(self) -> None:
        #: One for each tensor of :meth:`attach`, None where none arrived.
        self.gradients: list[Tensor | None] = []

    def attach(self, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
        """The same values as results of a node whose gradients arrive here; ``copy``: with memory of their own."""
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
