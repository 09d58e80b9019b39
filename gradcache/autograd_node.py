"""An autograd node with given outputs, whose backward is a function from their gradients to those of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipe.torch_private.autograd import keeps_graph, not_differentiable

__all__ = ["Gradients", "wide", "with_backward"]

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


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


_TWICE = (
    "expected a gradient to be differentiated once: a loss in parts (tile_rows, or a million scores) and a GradCache "
    "step cannot be differentiated twice; compute a loss with a penalty on its gradients with torch, in one piece"
)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Any, values: Sequence[Tensor], writable: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function = function
        return tuple(value if writable else value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        function = ctx.function
        if function is None:
            raise RuntimeError(
                "expected one backward through a graph, got a second one, and what it needs is freed; pass "
                "retain_graph=True to the first"
            )
        if not keeps_graph():
            ctx.function = None
        with torch.no_grad():
            found = function(gradients)
        if torch.is_grad_enabled():  # create_graph=True: without a graph, a penalty on gradients would train nothing
            found = [x if x is None else not_differentiable(x, _TWICE) for x in found]
        return None, None, None, *found
