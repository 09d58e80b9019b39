"""All private names of torch that the packages use, each behind a function or name that says what it means.

They have no public counterpart. A release that drops one breaks this module and no other; ``tests/pipe/
test_torch_private.py`` lists the releases that were checked. :data:`ATTRIBUTES` lists the private attributes of tensors
and modules that the packages use directly, since many other libraries rely on them too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn, overrides
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch as dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = [
    "ATTRIBUTES",
    "DISPATCH_MODES",
    "FUNCTION_MODES",
    "HOOKS_OF_MODULES",
    "BatchNorm",
    "BatchOrInstanceNorm",
    "DataLoaderIterator",
    "HiddenHooks",
    "ModeStack",
    "OperationMode",
    "SavedTensorHooks",
    "accumulates_everywhere",
    "at_end_of_backward",
    "caches_parametrizations",
    "global_module_hooks",
    "has_backward_hooks",
    "has_hooks",
    "has_module_hooks",
    "hidden_hooks",
    "in_backward",
    "is_requested",
    "is_traceable_wrapper_subclass",
    "keeps_graph",
    "memory_of",
    "multiply_all",
    "native_uses",
    "negative_view",
    "no_subclasses",
    "no_torch_function",
    "outside_inference_mode",
    "outside_of_compiled_graphs",
    "pop_saved_tensor_hooks",
    "pytree",
    "run_hooks_with_gradient_only",
    "saved_tensor_hooks",
    "set_grad_enabled",
    "set_versions",
    "storage_uses",
    "store_of_processes",
    "timeout_of",
    "transform_of_functions_under_way",
    "transform_under_way",
    "uncompiled_hooks",
    "will_run",
    "with_subclasses",
    "without_modes",
]

_SUBCLASSES = ("_make_wrapper_subclass",)
#: Private attributes of torch's objects that the packages read, write or override, by type.
ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Tensor: ("_base", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_indices", *_SUBCLASSES),
    nn.Module: (
        *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"),
        *("_apply", "_load_from_state_dict", "_save_to_state_dict"),
    ),
}

F = TypeVar("F", bound=Callable[..., Any])

SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

_autograd: Any = torch._C._autograd


# --- memory and counts ------------------------------------------------------------------------------------------------


def memory_of(tensor: Tensor) -> int:
    """A number that identifies the storage of a tensor while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Sets the version counters (of in-place changes) of tensors."""
    _autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors in place."""
    torch._foreach_mul_(tensors, factor)


def timeout_of(group: Any) -> timedelta:
    """The timeout of the collectives of a process group on the CPU."""
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def store_of_processes() -> tuple[Any, Callable[[], Any]]:
    """The key-value store of the default process group, and what makes a connection of its own to it.

    Without a connection of its own, a thread has to wait as long as another one waits for a key.
    """
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return store, getattr(store, "clone", lambda: store)  # torch 2.8 has one connection


def negative_view(tensor: Tensor) -> Tensor:
    """A view of the negated tensor."""
    return torch._neg_view(tensor)


def storage_uses(tensor: Tensor) -> int:
    """The number of tensors (and other owners) that share the memory of ``tensor``, itself included."""
    storage = tensor.untyped_storage()  # is one more owner
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined, unused-ignore]


def native_uses(tensor: Tensor) -> int:
    """The number of owners of a tensor in C++, its Python object included: graphs, and the parameter of a gradient."""
    return int(tensor._use_count())  # type: ignore[attr-defined, unused-ignore]


def caches_parametrizations(modules: Iterable[nn.Module]) -> bool:
    """Whether ``parametrize.cached()`` is in force, and one of the modules has a parametrization."""
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, modules))


# --- backward, and hooks of leaves ------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Within a backward: calls a function when it ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def accumulates_everywhere() -> bool:
    """Within a backward: whether it accumulates into ``.grad`` of every leaf.

    False inside ``torch.autograd.grad`` and ``backward(inputs=...)``.
    """
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[attr-defined, unused-ignore]


def is_requested(node: Any) -> bool:
    """Within ``torch.autograd.grad`` or ``backward(inputs=...)``: whether a leaf's node was requested."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:
        # The engine raises for a leaf that torch.autograd.grad captures, and returns False for any other leaf.
        return True


def will_run(node: Any) -> bool:
    """Within a backward: whether it runs a node of the graph that is not of a leaf."""
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined, unused-ignore]


#: Within a backward: whether the graph is retained. Releases without this function are assumed to retain it.
keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)


def has_hooks(leaf: Tensor) -> bool:
    """Whether the user registered hooks on a leaf: on its gradient, or after accumulation."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined, unused-ignore]


class HiddenHooks:
    """The hooks of one leaf. Between :meth:`hide` and :meth:`restore` autograd does not run them."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf: Any = leaf
        self._hooks = self._leaf._backward_hooks, self._leaf._post_accumulate_grad_hooks

    def changed(self, gradient: Tensor) -> Tensor:
        """Runs those of ``register_hook``; returns the gradient that they return."""
        for hook in list((self._hooks[0] or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def run_after_accumulation(self) -> None:
        """Runs those of ``register_post_accumulate_grad_hook``."""
        for hook in list((self._hooks[1] or {}).values()):
            hook(self._leaf)

    def hide(self) -> None:
        """Removes them, if there are any."""
        if any(self._hooks):
            self._leaf._backward_hooks, self._leaf._post_accumulate_grad_hooks = OrderedDict(), OrderedDict()

    def restore(self) -> None:
        """Restores them."""
        if any(self._hooks):
            # An empty mapping: None would clear the attribute, but not the hooks that the engine runs.
            self._leaf._backward_hooks = self._hooks[0]
            self._leaf._post_accumulate_grad_hooks = self._hooks[1] or OrderedDict()


@contextlib.contextmanager
def hidden_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """A context in which autograd accumulates into the leaves without running their hooks."""
    hidden = [HiddenHooks(leaf) for leaf in leaves if has_hooks(leaf)]
    try:
        for hooks in hidden:
            hooks.hide()
        yield
    finally:
        for hooks in hidden:
            hooks.restore()


def run_hooks_with_gradient_only(leaf: Tensor) -> None:
    """Within a backward, until it ends: runs the hooks of a leaf only if the leaf gets a gradient.

    Autograd runs the hooks of every leaf that it reaches, even if there is no gradient for it.
    """
    leaf_: Any = leaf
    hooks = HiddenHooks(leaf)
    received: list[Tensor] = []

    def gradient_hooks(gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        received.append(gradient)
        return hooks.changed(gradient)

    def accumulation_hooks(parameter: Tensor) -> None:
        if received:
            received.clear()
            hooks.run_after_accumulation()

    leaf_._backward_hooks = OrderedDict({0: gradient_hooks})
    leaf_._post_accumulate_grad_hooks = OrderedDict({0: accumulation_hooks})
    at_end_of_backward(hooks.restore)


# --- modes, compilers and transforms ----------------------------------------------------------------------------------


def set_grad_enabled(enabled: bool) -> None:
    """Sets the grad mode of this thread, without a context."""
    torch._C._set_grad_enabled(enabled)


def outside_inference_mode() -> contextlib.AbstractContextManager[None]:
    """A context for tensors that outlive the caller's modes: grad mode is on, inference mode is off.

    ``torch.inference_mode`` restores the grad mode of its begin when it is freed. If an interrupt skips its exit, that
    is with the traceback, after everything else was restored; so it is entered only where it is needed.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else torch.enable_grad()


def saved_tensor_hooks(*, while_tracing: bool = False) -> SavedTensorHooks | None:
    """The active saved-tensor hooks, or None. While a graph is being traced, None unless ``while_tracing``."""
    hooks: SavedTensorHooks | None = _autograd._top_saved_tensors_default_hooks(while_tracing)
    return hooks


def pop_saved_tensor_hooks() -> None:
    """Removes the active saved-tensor hooks."""
    _autograd._pop_saved_tensors_default_hooks()


@dataclass(frozen=True)
class ModeStack:
    """The modes of one kind that intercept torch's operations in this thread."""

    active: Callable[[], list[Any]]
    """Returns them, outermost first."""
    push: Callable[[Any], Any]
    pop: Callable[[], Any]
    """Removes the innermost one without its ``__exit__``."""

    @contextlib.contextmanager
    def pushed(self, mode: Any) -> Iterator[None]:
        """A context in which a mode is active.

        Its ``__enter__`` is not called: that may have effects that the user wants once (counters, printed summaries).
        """
        self.push(mode)
        try:
            yield
        finally:
            self.pop()


DISPATCH_MODES = ModeStack(dispatch._get_current_dispatch_mode_stack, dispatch._push_mode, dispatch._pop_mode)
FUNCTION_MODES = ModeStack(overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode)


class OperationMode(dispatch.TorchDispatchMode):
    """A ``TorchDispatchMode`` under which compiled layers run compiled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True."""
        return True

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context in which no mode and no tensor subclass intercepts operations."""
    with torch._C.DisableTorchFunction(), dispatch._disable_current_modes():
        yield


#: For ``__torch_function__`` of a subclass: its operations are those of a plain tensor and return plain tensors.
no_torch_function: Any = torch._C._disabled_torch_function_impl


#: The attributes of a module that hold its hooks by number, and options of some of these hooks.
HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)


def global_module_hooks() -> list[dict[int, Any]]:
    """The hooks that run for every module."""
    names = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"
    return [getattr(torch.nn.modules.module, name) for name in names]


def has_module_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks, of one of these modules or global ones, see its inputs or outputs."""
    return any(global_module_hooks()) or any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def has_backward_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks of one of these modules see gradients of its inputs or outputs."""
    return any(m._backward_hooks or m._backward_pre_hooks for m in modules)


def outside_of_compiled_graphs(function: F) -> F:
    """``torch.compiler.disable``, which imports the compiler when the function is first called, not before."""
    disabled: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined, unused-ignore]
    return cast(F, disabled)


def uncompiled_hooks(*hooks: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], ...]:
    """Wraps hooks so that ``torch.compile`` does not compile them; returns them unchanged if it was never imported.

    Saved-tensor hooks run inside the layers, so a compiled layer would compile them too.
    """
    if "torch._dynamo" not in sys.modules:
        return hooks
    return tuple(functools.partial(_call_uncompiled(), hook) for hook in hooks)


@functools.cache
def _call_uncompiled() -> Callable[..., Any]:
    disabled: Callable[..., Any] = torch.compiler.disable(lambda function, argument: function(argument))
    return disabled


def with_subclasses() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensor subclasses work as in a forward; the backward of a loss that is one disables them."""
    enable = getattr(torch._C, "_EnableTorchFunction", contextlib.nullcontext)
    return contextlib.nullcontext() if torch._C._is_torch_function_enabled() else enable()


def no_subclasses() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensor subclasses do not intercept functions: they act on the subclass's own tensor."""
    return torch._C.DisableTorchFunctionSubclass()


def transform_of_functions_under_way() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined, unused-ignore]


def transform_under_way(inputs: Iterable[Tensor]) -> str | None:
    """The name of an active mechanism other than autograd that transforms or traces a call on ``inputs``, or None."""
    if transform_of_functions_under_way():
        return "a transform of torch.func (grad, jvp, vmap, ...)"
    forward_mode = torch.autograd.forward_ad
    if forward_mode._current_level >= 0 and any(forward_mode.unpack_dual(x).tangent is not None for x in inputs):
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # type: ignore[attr-defined, unused-ignore]
        return "fake tensors (FakeTensorMode)"
    return None
