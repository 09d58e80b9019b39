"""Sums the gradients of many chunks in float32, and adds them to ``.grad`` at the end of the step.

Adding a thousand chunk gradients in bfloat16 loses all bits below the sum's last bit, which changes the result by
several per cent. So each chunk's gradient of a parameter narrower than 32 bits is added to a float32 sum when autograd
produces it, and the sum is rounded once.

Guarantees
    * Until :meth:`Accumulation.commit`, the user's ``.grad`` is kept separately; afterwards it is the old gradient plus
      this step's. After an exception every ``.grad`` is the same tensor object as before the step.
    * A parameter that no chunk used keeps its ``.grad``, None included.

No additional memory if ``.grad`` is None before the step (the default ``zero_grad()``); otherwise the old gradients
remain allocated beside the new ones until the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from offload.streaming.stored_gradients import set_gradient

__all__ = ["Accumulation"]

Reduce = Callable[[list[Tensor | None]], list[Tensor | None]]


class Accumulation:
    """A context manager that collects the gradients of one step separately from earlier ones.

    Args:
        parameters: the parameters of the step.
        at_home: those of them that belong to a streamed model, which sums their gradients itself.
    """

    def __init__(self, parameters: Iterable[Tensor], at_home: Iterable[Tensor] = ()) -> None:
        unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        #: The trainable parameters of this step, each once.
        self.parameters = list(unique.values())
        self._at_home = {id(parameter) for parameter in at_home}
        self._before: list[Tensor | None] = []
        self._sums: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._committed = False

    def __enter__(self) -> Accumulation:
        for parameter in self.parameters:
            self._before.append(parameter.grad)
            parameter.grad = None
            if parameter.dtype in (torch.bfloat16, torch.float16) and id(parameter) not in self._at_home:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_to_sum))
        return self

    def _add_to_sum(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if id(parameter) in self._sums:
            self._sums[id(parameter)].add_(gradient)
        else:
            self._sums[id(parameter)] = gradient.float()

    def take(self, parameter: Tensor) -> Tensor | None:
        """Removes and returns this step's gradient of a parameter, in the widest type that it was summed in."""
        gradient = self._sums.pop(id(parameter), None)
        if gradient is None:
            gradient, parameter.grad = parameter.grad, None
        return gradient

    def commit(self, reduce: Reduce | None = None) -> None:
        """Adds this step's gradients to the earlier ones.

        Args:
            reduce: reduces this process's gradients, in the order of the parameters, over all processes.
        """
        self.postponed(reduce)()

    def postponed(self, reduce: Reduce | None = None) -> Callable[[], None]:
        """Returns a function that does what :meth:`commit` does; until it is called, every ``.grad`` is the old one."""
        self._remove_hooks()
        gradients = [self.take(parameter) for parameter in self.parameters]
        self._restore()
        self._committed = True
        return partial(self._add, gradients, reduce)

    def _add(self, gradients: list[Tensor | None], reduce: Reduce | None) -> None:
        if reduce is not None:
            gradients = reduce(gradients)
        for k, parameter in enumerate(self.parameters):
            gradient, before = gradients[k], parameter.grad
            gradients[k] = None  # a sum of 32 bits is freed as soon as it is rounded
            if gradient is None:
                continue
            # What a home stores may have another type than its gradient, which keeps its own.
            dtype = gradient.dtype if id(parameter) in self._at_home else parameter.dtype
            if before is None:
                set_gradient(parameter, gradient.to(dtype))
            elif before.layout == gradient.layout:
                before.add_(gradient)  # in place, as autograd does: .grad stays the user's tensor
            else:
                set_gradient(parameter, (gradient + before).to(dtype))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __exit__(self, *error: Any) -> None:
        self._remove_hooks()
        self._sums.clear()
        if not self._committed:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self.parameters, self._before, strict=True):
            set_gradient(parameter, before)
