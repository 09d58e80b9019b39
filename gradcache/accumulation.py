"""Accumulation: the gradients of many chunks, added up exactly and handed over all at once.

Adding a thousand chunk gradients in bfloat16 loses what is smaller than the sum's last bit, several per cent in the
end. So each chunk's gradient of a parameter narrower than 32 bits is added to a float32 sum as it appears, and is
rounded once.

Guarantees
    * Until :meth:`Accumulation.commit`, ``.grad`` as the user left it is put aside; afterwards it is the old gradient
      plus this step's. After an exception every ``.grad`` is the very tensor that it was before the step.
    * A parameter that no chunk reached keeps its ``.grad``, None included.

Costs nothing where ``.grad`` is None before the step (``zero_grad()`` as it is by default); else the old gradients stay
alive beside the new ones until the step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["Accumulation"]


class Accumulation:
    """The gradients of one step, apart from those that were there before it. A context manager.

    Args:
        parameters: whose gradients.
        at_home: those among them that a streamed model owns, which brings sums of its own to them.
    """

    def __init__(self, parameters: Iterable[Tensor], at_home: Iterable[Tensor] = ()) -> None:
        unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        self._parameters = list(unique.values())
        self._at_home = {id(parameter) for parameter in at_home}
        self._before: list[Tensor | None] = []
        self._sums: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        self._committed = False

    def __enter__(self) -> Accumulation:
        for parameter in self._parameters:
            self._before.append(parameter.grad)
            parameter.grad = None
            if parameter.dtype in (torch.bfloat16, torch.float16) and id(parameter) not in self._at_home:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_to_sum))
        return self

    def _add_to_sum(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        total = self._sums.get(id(parameter))
        if total is None:
            self._sums[id(parameter)] = gradient.float()
        else:
            total.add_(gradient)
        parameter.grad = None

    def take(self, parameter: Tensor) -> Tensor | None:
        """This step's gradient of a parameter, in the widest type that it was summed in; it is forgotten here."""
        gradient = self._sums.pop(id(parameter), None)
        if gradient is None:
            gradient, parameter.grad = parameter.grad, None
        return gradient

    def commit(self, reduce: Callable[[list[Tensor | None]], list[Tensor | None]] | None = None) -> None:
        """Adds this step's gradients to those that were there before.

        Args:
            reduce: turns this process's gradients, in the order of the parameters, into those of all processes.
        """
        self.postponed(reduce)()

    def postponed(
        self, reduce: Callable[[list[Tensor | None]], list[Tensor | None]] | None = None
    ) -> Callable[[], None]:
        """As :meth:`commit`, but until the function that it returns is called every ``.grad`` is what it was before."""
        self._remove_hooks()
        gradients = [self.take(parameter) for parameter in self._parameters]
        self._restore()
        self._committed = True
        return partial(self._add, gradients, reduce)

    def _add(
        self,
        gradients: list[Tensor | None],
        reduce: Callable[[list[Tensor | None]], list[Tensor | None]] | None,
    ) -> None:
        if reduce is not None:
            gradients = reduce(gradients)
        for k, parameter in enumerate(self._parameters):
            gradient, before = gradients[k], parameter.grad
            gradients[k] = None  # a sum of 32 bits is freed as soon as it is rounded
            if gradient is None:
                parameter.grad = before
            elif before is None:
                parameter.grad = gradient.to(parameter.dtype)
            elif before.layout == gradient.layout:
                parameter.grad = before.add_(gradient)  # the user's tensor stays the gradient, as autograd keeps it
            else:
                parameter.grad = (gradient + before).to(parameter.dtype)

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable parameters of this step, each once."""
        return self._parameters

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_hooks()
        self._sums.clear()
        if not self._committed:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before
