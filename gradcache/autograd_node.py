"""An autograd node with given outputs, whose backward is a function from their gradients to those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipe.torch_private.autograd import keeps_graph

__all__ = ["Gradients", "with_backward"]

Gradients = Sequence[Tensor | None]


def with_backward(
    values: Sequence[Tensor],
    inputs: Sequence[Tensor],
    backward: Callable[[Gradients], Gradients],
    *,
    writable: bool = True,
) -> list[Tensor]:
    """``values`` with a graph, if an input needs a gradient.

    Args:
        values: tensors without a graph, which nothing else uses.
        inputs: any tensors.
        backward: given the gradients of the values, returns those of the inputs. Not differentiable itself. It is
            freed, with all that it refers to, once it has run, unless the graph is retained.
        writable: if False, torch refuses to write the results in place.
    """
    return list(_Node.apply(backward, values, writable, *inputs))  # type: ignore[no-untyped-call]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Any, values: Sequence[Tensor], writable: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function = function
        return tuple(value if writable else value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function = ctx.function
        if function is None:
            raise RuntimeError(
                "expected one backward through a graph, got a second one, and what it needs is freed; pass "
                "retain_graph=True to the first"
            )
        if not keeps_graph():
            ctx.function = None
        return None, None, None, *function(gradients)
