"""Accumulates the gradients of all micro-batches of a step, and runs parameter hooks once, at its end.

A step runs a backward for each cell, and each adds to ``.grad``. To the user this must look like one backward: hooks of
parameters get the gradient of the batch, once, and an optimizer that steps in such a hook steps once. So inside a step
gradients start from None and hooks are disabled; at its end each gradient is passed to its hooks and added to the
earlier gradient.

Invariants
    * ``Tensor.register_hook`` and ``register_post_accumulate_grad_hook`` of a parameter run once for a step, after its
      last cell, if the parameter has a gradient.
    * After an exception inside the step every parameter has its gradient and hooks from before, and no hook has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pipe.torch_private.autograd import HiddenHooks
from pipe.torch_private.tensors import add_all

__all__ = ["leaves_of", "parameters_of", "step_gradients"]


def parameters_of(*modules: nn.Module, without: Iterable[object]) -> list[nn.Parameter]:
    """The parameters of modules, except those of the modules ``without``, which are not accessed."""
    hidden = {id(other) for other in without}
    found: dict[int, nn.Parameter] = {}
    waiting: list[nn.Module | None] = [*modules]
    while waiting:
        inner = waiting.pop()
        if inner is not None and id(inner) not in hidden:
            found.update([(id(p), p) for p in inner._parameters.values() if p is not None])
            waiting += inner._modules.values()
    return list(found.values())


def leaves_of(*outputs: Tensor) -> Iterator[Tensor]:
    """Each trainable leaf that the graph of ``outputs`` reaches, one of them included."""
    seen: set[Any] = set()
    waiting: list[Any] = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


@contextlib.contextmanager
def step_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A context for any number of backwards, in which gradients start from None; at its end they are added to those
    from before.
    """
    before: list[tuple[Any, Tensor | None]] = [(parameter, parameter.grad) for parameter in parameters]
    hidden = [
        (parameter, HiddenHooks(parameter))
        for parameter, _ in before
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    try:
        try:
            for parameter, _ in before:
                parameter.grad = None
            for _, hooks in hidden:
                hooks.hide()
            yield
        finally:
            for _, hooks in hidden:
                hooks.restore()
        hidden = [(parameter, hooks) for parameter, hooks in hidden if parameter.grad is not None]
        with torch.no_grad():
            for parameter, hooks in hidden:
                parameter.grad = hooks.changed(parameter.grad)
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    both = [(gradient, p.grad) for p, gradient in before if gradient is not None and p.grad is not None]
    for parameter, gradient in before:
        parameter.grad = parameter.grad if gradient is None else gradient
    with torch.no_grad():
        if both:
            add_all([gradient for gradient, _ in both], [added for _, added in both])
        for _, hooks in hidden:
            hooks.run_after_accumulation()
