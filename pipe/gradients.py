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

import torch
from torch import Tensor, nn

from pipe.torch_private.autograd import HiddenHooks, has_hooks
from pipe.torch_private.tensors import add_all

__all__ = ["StepGradients", "parameters_of"]


def parameters_of(module: nn.Module, *, without: Iterable[object]) -> list[nn.Parameter]:
    """The parameters of a module, except those of the modules ``without``, which are not accessed."""
    hidden = {id(other) for other in without}
    found: dict[int, nn.Parameter] = {}
    waiting: list[nn.Module | None] = [module]
    while waiting:
        inner = waiting.pop()
        if inner is not None and id(inner) not in hidden:
            found.update([(id(p), p) for p in inner._parameters.values() if p is not None])
            waiting += inner._modules.values()
    return list(found.values())


class StepGradients:
    """Gradients of parameters inside a step.

    Usage::

        gradients = StepGradients(parameters)
        with gradients.accumulated():
            ...                             # any number of backwards
            gradients.scale = factor        # optional: multiplies all of them
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        #: A 0-dimensional tensor that multiplies the gradients of the step at its end, or None.
        self.scale: Tensor | None = None

    @contextlib.contextmanager
    def accumulated(self) -> Iterator[None]:
        """A context in which gradients start from None. At its end they are added to the earlier gradients."""
        before = [(parameter, parameter.grad) for parameter in self.parameters]
        hidden = [(parameter, HiddenHooks(parameter)) for parameter in self.parameters if has_hooks(parameter)]
        try:
            try:
                for parameter in self.parameters:
                    parameter.grad = None
                for _, hooks in hidden:
                    hooks.hide()
                yield
            finally:
                for _, hooks in hidden:
                    hooks.restore()
            with torch.no_grad():
                self._scale()
                for parameter, hooks in hidden:
                    if parameter.grad is not None:
                        parameter.grad = hooks.changed(parameter.grad)
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        with torch.no_grad():
            reached = {id(parameter) for parameter, _ in hidden if parameter.grad is not None}
            sums = [(gradient, parameter.grad) for parameter, gradient in before if gradient is not None]
            added = [(a, b) for a, b in sums if b is not None]
            if added:
                add_all([a for a, _ in added], [b for _, b in added])
            for parameter, gradient in before:
                if gradient is not None:
                    parameter.grad = gradient
            for parameter, hooks in hidden:
                if id(parameter) in reached:
                    hooks.run_after_accumulation()

    def _scale(self) -> None:
        if self.scale is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.scale.to(parameter.grad.device))
