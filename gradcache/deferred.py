"""An autograd node whose outputs are the representations of the batch and whose backward runs the second pass.

A training loop that calls ``loss.backward()`` itself (a Trainer, a gradient scaler, an outer accumulation) cannot call
a step that computes gradients by itself. So the representations of the whole batch are returned as the result of one
autograd node::

    inputs --> [encoded in chunks] --> representations --> any loss, any further graph --> loss.backward()
                     |                                                                         |
                     '---- second pass, chunk by chunk  <---- gradient of the representations -'

The node keeps the states of the first pass; backward through it may run once, as with ``retain_graph=False``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradcache.representations import with_leaves
from pipe.nested import flatten, unflatten

__all__ = ["attach"]

SecondPass = Callable[[Any], Sequence[Tensor | None]]


def attach(encoded: Any, differentiable: Sequence[bool], inputs: Sequence[Tensor], second_pass: SecondPass) -> Any:
    """The representations ``encoded``, one nested value per tower, with a graph.

    Args:
        encoded: detached representations.
        differentiable: for each tower, whether it needs a gradient.
        inputs: tensors that need a gradient, which ``second_pass`` returns.
        second_pass: given the gradient of ``encoded`` (None where there is none), returns the gradients of ``inputs``.
    """
    leaves, spec = flatten(list(encoded))
    wanted: list[bool] = []
    for tower, wants in zip(encoded, differentiable, strict=True):
        for leaf in flatten(tower)[0]:
            floating = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            wanted.append(wants and floating)
    chosen = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
    if not chosen:
        return tuple(encoded)

    def run(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        given, wants = iter(gradients), iter(wanted)
        parts = [[next(given) if next(wants) else None for _ in flatten(tower)[0]] for tower in encoded]
        return second_pass([with_leaves(part, flatten(tower)[1]) for part, tower in zip(parts, encoded, strict=True)])

    # An input that needs a gradient, so that the node is in a graph even if no other input needs one.
    root = torch.empty(0, requires_grad=True)
    attached = iter(_Encoded.apply(run, chosen, root, *inputs))  # type: ignore[no-untyped-call]
    return tuple(
        unflatten([next(attached) if wants else leaf for leaf, wants in zip(leaves, wanted, strict=True)], spec)
    )


class _Encoded(torch.autograd.Function):
    """Returns views of the values; backward runs the second pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, values: list[Tensor], root: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.run is None:
            raise RuntimeError("expected one backward through representations in chunks; encode the batch again")
        run, ctx.run = ctx.run, None
        return None, None, None, *run(gradients)
