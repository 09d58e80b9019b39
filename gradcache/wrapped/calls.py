"""The calls of streamed models inside a tower: their state, their inputs and outputs, and the gradients of both.

The calls of many chunks run together, later than each chunk made its own. Other chunks' forwards run in between, so
state that a chunk set around its call (an attribute of a layer, a disabled adapter, a swapped parameter, a context
variable) may have changed. Thread settings and ``training`` flags are restored; for other state a change is only
detected, and the call then runs inside the forward.

The outputs are returned each time the forward around the call is repeated. Each time they begin a new graph, and the
gradients that are computed there are summed until all users of the outputs have run backward.

Limits: objects that layers refer to are compared one level deep, so a value that changes at a deeper level, or in a
global or a closure, is taken to be the same for all chunks.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.autograd_node import Gradients, with_backward
from gradcache.context_managers import device_of
from pipe.nested import TreeSpec, flatten, unflatten
from pipe.phony import get_phony
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.thread_state import ThreadState
from pipe.torch_private.autograd import saved_tensor_hooks
from pipe.torch_private.dispatch import DISPATCH_MODES
from pipe.torch_private.tracing import transform_of_functions_under_way

__all__ = ["Call", "Observer", "set_modes", "why_not_deferred"]


class Observer:
    """Reads the state that the calls of one streamed model depend on besides their arguments."""

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


class Call:
    """A call of a streamed model, at which a forward is suspended until it has run."""

    def __init__(self, model: Any, micro_batches: Sequence[Any], observer: Observer) -> None:
        inputs, self._input_spec = flatten(list(micro_batches))
        self.model = model
        self._requires = _requires(inputs)
        self._inputs = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        self._versions = _versions(inputs)
        self._observer = observer
        self._thread_state = thread = ThreadState.capture(observer.devices)
        self._modes = tuple(module.training for module in observer.modules)
        self._state = observer.state()
        function_modes = tuple(type(mode) for mode in thread.function_modes)
        settings = (thread.grad, thread.inference, thread.autocasts, function_modes, thread.hooks is None)
        #: Equal for calls that can be run together.
        self.key = (id(model), self._modes, *settings)
        #: Whether it ran with gradients.
        self._records = False
        self.input_gradients: list[Tensor | None] = []
        #: The outputs, flat and detached.
        self.outputs: list[Any] = []
        self._spec: TreeSpec | None = None
        #: Number of leaves of the output of each micro-batch.
        self._leaves: list[int] = []
        self._differentiable: list[bool] = []
        self._gradients: list[Tensor | None] = []

    # --- the run, later -----------------------------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """The reason why it cannot run any more as when it was made; empty if it can."""
        if not _same(self._observer.state(), self._state):
            return "the tower changes its state only during the call"
        return "its arguments are overwritten by the next chunk's" if _versions(self._inputs) != self._versions else ""

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """A context with the thread settings and ``training`` flags of the call."""
        modules = self._observer.modules
        before = [module.training for module in modules]
        try:
            set_modes(modules, self._modes)
            with self._thread_state.again():
                yield
        finally:
            set_modes(modules, before)

    def enter(self) -> list[Any]:
        """The micro-batches for the run, which is about to begin in the context of :meth:`settings`."""
        self._records = torch.is_grad_enabled()
        inputs, self._inputs, self._state = self._inputs, [], []
        del self._thread_state
        self.input_gradients = [None] * len(inputs)
        entering = _with_graph(inputs, self._requires, self.input_gradients, copy=False)
        return unflatten(entering, self._input_spec)  # type: ignore[no-any-return]

    def fill(self, outputs: Sequence[Any], differentiable: Sequence[bool]) -> None:
        """Stores the outputs of all micro-batches, detached, and which of their leaves need a gradient."""
        self.outputs, self._spec = flatten(list(outputs))
        self._leaves = [len(flatten(output)[0]) for output in outputs]
        self._differentiable = list(differentiable)
        self._gradients = [None] * len(self.outputs)

    # --- the forward around it ----------------------------------------------------------------------------------

    def repeats(self, model: Any, micro_batches: Sequence[Any]) -> str:
        """How a call that was made in its place differs from it; empty if it does not."""
        inputs, spec = flatten(list(micro_batches))
        if model is not self.model or spec != self._input_spec:
            return "in another order, or with other arguments, than"
        # A call that ran without gradients in the first pass cannot return gradients.
        same = torch.is_grad_enabled() == self._records and _requires(inputs) == self._requires
        return "" if same else "with inputs that need other gradients than"

    def attach(self) -> list[Any]:
        """Copies of the outputs, with a new graph if they need a gradient, which is added to that of other copies."""
        assert self._spec is not None
        wanted = [wants and torch.is_grad_enabled() for wants in self._differentiable]
        copies: list[Any] = unflatten(_with_graph(self.outputs, wanted, self._gradients, copy=True), self._spec)
        return copies

    def take_gradients(self) -> list[Any]:
        """The summed gradients of the outputs, one per micro-batch (None if it has none). Drops them.

        A list of the gradient of each leaf: containers of some libraries forget members that are None.
        """
        gradients, self._gradients = iter(self._gradients), []
        parts = [list(itertools.islice(gradients, leaves)) for leaves in self._leaves]
        return [part if representations.has_gradient(part) else None for part in parts]


def _with_graph(leaves: Sequence[Any], wanted: Sequence[bool], sums: list[Tensor | None], *, copy: bool) -> list[Any]:
    """Copies of ``leaves``, or detached, with a graph for those ``wanted``, whose gradients are added to ``sums``.

    The graph begins with a node, not with leaves: autograd copies a leaf's gradient into the leaf's own layout, and the
    next operation would then sum it in another order than in the plain model.
    """
    made = [x if not isinstance(x, Tensor) else x.clone() if copy else x.detach() for x in leaves]
    positions = [k for k, wants in enumerate(wanted) if wants]

    def add(gradients: Gradients) -> Gradients:
        for k, gradient in zip(positions, gradients, strict=True):
            before = sums[k]
            sums[k] = gradient if before is None else before if gradient is None else before + gradient
        return (None,)

    if positions:
        values = [made[k] for k in positions]
        with torch.enable_grad():
            values = with_backward(values, [get_phony(values[0].device, requires_grad=True)], add)
        for k, value in zip(positions, values, strict=True):
            made[k] = value
    return made


def _same(a: list[Any], b: list[Any]) -> bool:
    return a is b or (len(a) == len(b) and all(map(operator.is_, a, b)))


def _requires(leaves: Sequence[Any]) -> list[bool]:
    return [isinstance(x, Tensor) and x.requires_grad for x in leaves]


def _versions(leaves: Sequence[Any]) -> list[int]:
    """The version counters of the tensors that have one (all except inference tensors)."""
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


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
