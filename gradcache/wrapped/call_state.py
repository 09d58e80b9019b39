"""Records the state that a call of a streamed model depends on besides its arguments, and checks it when the call runs.

The calls of many chunks run together, later than each chunk made its own. Other chunks' forwards run in between, so
state that a chunk set around its call (an attribute of a layer, a disabled adapter, a swapped parameter, a context
variable) may have changed. Thread settings and ``training`` flags are restored; for other state a change is only
detected.

Limits: objects that layers refer to are compared one level deep, so a value that changes at a deeper level, or in a
global or a closure, is taken to be the same for all chunks.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache.context_managers import device_of
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.thread_state import ThreadState
from pipe.torch_private.autograd import saved_tensor_hooks
from pipe.torch_private.dispatch import DISPATCH_MODES
from pipe.torch_private.tracing import transform_of_functions_under_way

__all__ = ["CallState", "Observer", "set_modes", "why_not_deferred"]


class Observer:
    """Reads the state at the calls of one streamed model."""

    def __init__(self, model: nn.Module) -> None:
        # The model's own attributes change whenever it runs; a caller's changes are in its layers.
        self.modules = [module for child in model.children() for module in child.modules()]
        #: The device types whose autocast settings matter.
        self.devices = [device_of(model).type]
        self._last: list[Any] = []

    def state(self) -> list[Any]:
        """The objects that the modules' attributes refer to. Consecutive equal states are the same list."""
        # The objects themselves, not their ids: the id of a freed object may be reused.
        state: list[Any] = [torch.get_default_dtype()]
        state.extend(item for pair in contextvars.copy_context().items() for item in pair)
        for module in self.modules:
            for name, value in module.__dict__.items():
                if name == "training":
                    continue
                state.append(value)
                if isinstance(value, dict):
                    state.extend(dict.values(value))  # not value.values(): a subclass may record that as a read
                elif isinstance(value, (list, tuple, set)):
                    state.extend(value)
                elif not isinstance(value, (Tensor, nn.Module, type)) and hasattr(value, "__dict__"):
                    state.extend(vars(value).values())
        if not _same(state, self._last):
            self._last = state
        return self._last


class CallState:
    """Settings of the thread, ``training`` flags and state of a model's layers at one call."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._thread_state = thread = ThreadState.capture(observer.devices)
        self._modes = tuple(module.training for module in observer.modules)
        self._state = observer.state()
        function_modes = tuple(type(mode) for mode in thread.function_modes)
        #: Equal for calls that can be run together.
        self.key = (self._modes, thread.grad, thread.inference, thread.autocasts, function_modes, thread.hooks is None)

    @property
    def changed(self) -> bool:
        """Whether state that :meth:`again` cannot restore has changed since the call."""
        return not _same(self._observer.state(), self._state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with the thread settings and ``training`` flags of the call."""
        modules = self._observer.modules
        before = [module.training for module in modules]
        try:
            set_modes(modules, self._modes)
            with self._thread_state.again():
                yield
        finally:
            set_modes(modules, before)


def _same(a: list[Any], b: list[Any]) -> bool:
    return a is b or (len(a) == len(b) and all(map(operator.is_, a, b)))


def why_not_deferred() -> str:
    """The reason why a call that is made now cannot be run later; empty if it can."""
    hooks = saved_tensor_hooks()
    if hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint":
        return "it is called inside torch.utils.checkpoint, which counts the tensors that its forward saves"
    if transform_of_functions_under_way():
        return "it is called inside a transform of torch.func"
    if any(not isinstance(mode, FirstWrites) for mode in DISPATCH_MODES.active()):
        return "it is called under a TorchDispatchMode, which sees the operations of the call"
    return ""


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Sets each module's ``training`` flag, without its children's."""
    for module, training in zip(modules, modes, strict=True):
        if module.training != training:
            module.training = training
