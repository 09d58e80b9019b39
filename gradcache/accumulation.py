"""Sums the gradients of many chunks, narrow ones in float32, and adds them to ``.grad`` at the end of the step.

Adding a thousand chunk gradients in bfloat16 loses all bits below the sum's last bit, which changes the result by
several per cent. So each chunk's gradient of a parameter narrower than 32 bits is added to a float32 sum when autograd
produces it, and the sum is rounded once.

Guarantees
    * Until :meth:`Accumulation.commit`, the user's ``.grad`` is kept separately; afterwards it is the old gradient plus
      this step's. After an exception every ``.grad`` is the same tensor object as before the step; left out are
      parameters of a streamed model that have a gradient and hooks that run after accumulation, which see the sum.
    * A parameter that no chunk used keeps its ``.grad``, None included.
    * Hooks of a parameter (``register_hook``, ``register_post_accumulate_grad_hook``) are hidden from the chunks. They
      run once, on the sum of all chunks and towers, before and after it is added to ``.grad``; a hook may step an
      optimizer and clear ``.grad``. Over processes the former see this process's sum, as with
      DistributedDataParallel, and the latter the averaged gradient.

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

from gradcache.autograd_node import wide
from offload.streaming.stored_gradients import set_gradient
from pipe.torch_private.autograd import HiddenHooks, has_hooks

__all__ = ["Accumulation"]

Reduce = Callable[[list[Tensor | None]], list[Tensor | None]]


class Accumulation:
    """A context manager that collects the gradients of one step separately from earlier ones.

    Args:
        parameters: the parameters of the step.
        at_home: those of them that belong to a streamed model, which sums their gradients and runs their hooks itself.

    Raises:
        ValueError: for parameters with an optimizer of ``_apply_optimizer_in_backward``, which cannot wait for the sum.
    """

    def __init__(self, parameters: Iterable[Tensor], at_home: Iterable[Tensor] = ()) -> None:
        unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
        #: The trainable parameters of this step, each once.
        self.parameters = list(unique.values())
        self._at_home = {id(parameter) for parameter in at_home}
        self._before: list[Tensor | None] = []
        self._sums: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        #: Those of parameters, by ``id`` of the parameter.
        self._hidden: dict[int, HiddenHooks] = {}
        self._committed = False
        if any(getattr(parameter, "_in_backward_optimizers", None) for parameter in self.parameters):
            raise ValueError(
                "expected parameters whose gradients can be summed over chunks, got some of "
                "_apply_optimizer_in_backward(), whose optimizers would step once for each chunk; step an optimizer "
                "after the step, or in a hook of register_post_accumulate_grad_hook()"
            )
        # What is not set aside: the hook of a home must see the old gradient as well.
        self.parameters = [parameter for parameter in self.parameters if not self._is_added_at_home(parameter)]

    def _is_added_at_home(self, parameter: Tensor) -> bool:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        return id(parameter) in self._at_home and bool(hooks) and parameter.grad is not None

    def __enter__(self) -> Accumulation:
        self._before = [parameter.grad for parameter in self.parameters]
        try:
            for parameter in self.parameters:
                parameter.grad = None
                if id(parameter) in self._at_home:
                    continue
                if has_hooks(parameter):
                    self._hidden[id(parameter)] = hidden = HiddenHooks(parameter)
                    hidden.hide()
                if wide(parameter.dtype) != parameter.dtype:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._add_to_sum))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add_to_sum(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and id(parameter) in self._sums:
            self._sums[id(parameter)].add_(gradient)
        elif gradient is not None:
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
        self._show_hooks()
        gradients = [self.take(parameter) for parameter in self.parameters]
        self._restore()
        self._committed = True
        return partial(self._add, gradients, reduce)

    @torch.no_grad()
    def _add(self, gradients: list[Tensor | None], reduce: Reduce | None) -> None:
        # The hooks are called here, not by a backward, whose hooks wrappers may take for another one's.
        for k, parameter in enumerate(self.parameters):
            hooks, gradient = self._hidden.get(id(parameter)), gradients[k]
            if hooks is not None and gradient is not None:
                gradients[k] = hooks.changed(gradient.to(parameter.dtype))
        gradients = gradients if reduce is None else reduce(gradients)
        hooked: list[HiddenHooks | None] = []
        for k, parameter in enumerate(self.parameters):
            gradient, gradients[k] = gradients[k], None  # a sum of 32 bits is freed as soon as it is rounded
            if gradient is not None:
                self._add_one(parameter, gradient)
                hooked.append(self._hidden.get(id(parameter)))
            del gradient
        # Last, since such a hook may step an optimizer that has other parameters, too.
        for hooks in hooked:
            if hooks is not None:
                hooks.run_after_accumulation()

    def _add_one(self, parameter: Tensor, gradient: Tensor) -> None:
        # What a home stores may have another type than its gradient, which keeps its own.
        dtype, before = gradient.dtype if id(parameter) in self._at_home else parameter.dtype, parameter.grad
        if before is None:
            set_gradient(parameter, gradient.to(dtype))
        elif before.layout == gradient.layout:
            before.add_(gradient)  # in place, as autograd does: .grad stays the user's tensor
        else:
            set_gradient(parameter, (gradient + before).to(dtype))

    def _show_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for hidden in self._hidden.values():
            hidden.restore()

    def __exit__(self, *error: Any) -> None:
        self._show_hooks()
        self._sums.clear()
        if not self._committed:
            self._restore()

    def _restore(self) -> None:
        for parameter, before in zip(self.parameters, self._before, strict=True):
            set_gradient(parameter, before)
