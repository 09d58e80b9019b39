"""Explicit order in backward between operations that share no value.

Micro-batches are independent, so autograd may run their backwards in any order; a pipeline needs one order. ``fork``
takes a phony out of a tensor, ``join`` puts it into another::

    a ── Fork ───────────── a'        forward:   a, phony = fork(a)
           ╰── phony ──╮                         b = join(b, phony)
    b ─────────────── Join ── b'      backward:  Join runs before Fork, so b' goes back before a does

Invariant: values and gradients pass through unchanged, and an absent gradient stays absent.

Source: torchgpipe (Kim et al., 2020), section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipe.phony import get_phony

__all__ = ["Fork", "Join", "fork", "join"]


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """The same tensor, and a phony that depends on it. Without a gradient to order, the phony is a plain one."""
    if torch.is_grad_enabled() and input.requires_grad:
        output: tuple[Tensor, Tensor] = Fork.apply(input)  # type: ignore[no-untyped-call]
        return output
    return input, get_phony(input.device, requires_grad=False)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """The same tensor, but its backward comes before that of whatever ``phony`` was forked from.

    A floating-point or complex ``input`` that needs no gradient needs one afterwards if ``phony`` does; others, which
    can have none, are returned as they are.
    """
    differentiable = input.is_floating_point() or input.is_complex()
    if torch.is_grad_enabled() and differentiable and (input.requires_grad or phony.requires_grad):
        output: Tensor = Join.apply(input, phony)  # type: ignore[no-untyped-call]
        return output
    return input


class Fork(torch.autograd.Function):
    """Takes a phony out of a tensor."""

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
    """Puts a phony into a tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, phony: Tensor) -> Tensor:
        """``input``."""
        ctx.set_materialize_grads(False)
        return input.detach()

    @staticmethod
    def backward(ctx: Any, grad_input: Tensor | None) -> tuple[Tensor | None, None]:
        """The gradient of ``input``, unchanged."""
        return grad_input, None
