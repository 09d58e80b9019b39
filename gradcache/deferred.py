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

from gradcache.autograd_node import Gradients, with_backward
from gradcache.representations import with_leaves
from pipe.nested import flatten, unflatten

__all__ = ["attach"]


def attach(
    encoded: Any,
    differentiable: Sequence[bool],
    inputs: Sequence[Tensor],
    second_pass: Callable[[Any], Gradients] | None,
) -> tuple[Any, ...]:
    """The representations ``encoded``, one nested value per tower, with a graph if the tower is ``differentiable``.

    ``second_pass`` gets the gradient of ``encoded`` (None where there is none), and returns those of ``inputs``.
    """
    leaves, spec = flatten(list(encoded))
    towers = [flatten(tower) for tower in encoded]
    structures = [(len(own), structure) for own, structure in towers]
    wanted: list[bool] = []
    for (own, _), wants in zip(towers, differentiable, strict=True):
        for leaf in own:
            floating = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            wanted.append(wants and floating)
    chosen = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
    if not chosen:
        return tuple(encoded)

    def backward(gradients: Gradients) -> Gradients:
        nonlocal second_pass
        if second_pass is None:
            raise RuntimeError("expected one backward through representations in chunks; encode the batch again")
        run, second_pass = second_pass, None  # frees the states of the first pass
        given, wants = iter(gradients), iter(wanted)
        # By structures, not from the representations: a loss that is kept would keep these.
        parts = [([next(given) if next(wants) else None for _ in range(n)], structure) for n, structure in structures]
        return None, *run([with_leaves(part, structure) for part, structure in parts])

    # An input that needs a gradient, so that the node is in a graph even if no other input needs one.
    root = torch.empty(0, requires_grad=True)
    # Several tensors of one tower may have shared memory, which those of all chunks together do not.
    writable = len(leaves) == len(encoded)
    values = [value.detach() for value in chosen]
    attached = iter(with_backward(values, [root, *inputs], backward, writable=writable))
    return tuple(
        unflatten([next(attached) if wants else leaf for leaf, wants in zip(leaves, wanted, strict=True)], spec)
    )
