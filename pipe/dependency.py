"""Autograd edges between tensors that share no value, which fix the order of their backwards (fork and join).

Micro-batches are independent, so autograd may run their backwards in any order; a pipeline needs one order. ``fork``
returns an empty tensor (phony) that depends on a tensor, ``join`` makes another tensor depend on that phony::

    a ── Fork ───────────── a'        forward:   a, phony = fork(a)
           ╰── phony ──╮                         b = join(b, phony)
    b ─────────────── Join ── b'      backward:  Join runs before Fork, so the backward of b' precedes that of a

Invariant: values and gradients pass through unchanged, and a missing (None) gradient stays None.

Source: torchgpipe (Kim et al., 2020), section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipe.phony import get_phony

__all__ = ["Fork", "Join", "fork", "join"]


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """The same tensor, and a phony that depends on it. If the tensor needs no gradient, the phony needs none either."""
    if torch.is_grad_enabled() and input.requires_grad:
        output: tuple[Tensor, Tensor] = Fork.apply(input)  # type: ignore[no-untyped-call]
        return output
    return input, get_phony(input.device, requires_grad=False)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """The same tensor, but its backward runs before that of the tensor from which ``phony`` was forked.

    If ``phony`` needs a gradient, so does the result of a floating-point or complex ``input``. Tensors of other types
    cannot have a gradient and are returned unchanged.
    """
    differentiable = input.is_floating_point() or input.is_complex()
    if torch.is_grad_enabled() and differentiable and (input.requires_grad or phony.requires_grad):
        output: Tensor = Join.apply(input, phony)  # type: ignore[no-untyped-call]
        return output
    return input


class Fork(torch.autograd.Function):
    """Returns the tensor and a phony that depends on it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        """``input`` and a phony."""
        ctx.set_materialize_grads(False)
        return input.detach(), get_phony(input.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, grad_input: Tensor | None, grad_phony: Tensor | None) -> Tensor | None:
        """The gradient of ``input``, unchanged."""
        return grad_input


class Join(torch.autograd.Function):
    """Returns the tensor, which now also depends on a phony."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, phony: Tensor) -> Tensor:
        """``input``."""
        ctx.set_materialize_grads(False)
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad_input: Tensor | None) -> tuple[Tensor | None, None]:
        """The gradient of ``input``, unchanged."""
        return grad_input, None
