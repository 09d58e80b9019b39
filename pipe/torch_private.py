"""Names of torch that are not public, each behind a function that says what it means.

Everything here has been in torch since 2.6, and has no public counterpart. A release that drops one breaks this module
and no other.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

__all__ = [
    "HOOKS_OF_MODULES",
    "accumulates_everywhere",
    "global_module_hooks",
    "has_hooks",
    "hidden_hooks",
    "is_requested",
    "keeps_graph",
    "native_uses",
    "outside_of_compiled_graphs",
    "run_hooks_with_gradient_only",
    "storage_uses",
    "transform_under_way",
    "uncompiled_hooks",
    "with_subclasses",
]

F = TypeVar("F", bound=Callable[..., Any])

_autograd: Any = torch._C._autograd


def storage_uses(tensor: Tensor) -> int:
    """How many tensors (and other owners) share the memory of ``tensor``, itself included."""
    storage = tensor.untyped_storage()  # counts as one more
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined, unused-ignore]


def native_uses(tensor: Tensor) -> int:
    """How many owners a tensor has in C++, its Python object included: graphs, and the parameter of a gradient."""
    return int(tensor._use_count())  # type: ignore[attr-defined, unused-ignore]


def accumulates_everywhere() -> bool:
    """Within a backward: whether it fills ``.grad`` of every leaf.

    False inside ``torch.autograd.grad`` and ``backward(inputs=...)``.
    """
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[attr-defined, unused-ignore]


def is_requested(node: Any) -> bool:
    """Within ``torch.autograd.grad`` or ``backward(inputs=...)``: whether a leaf's gradient was asked for.

    Args:
        node: the leaf's ``AccumulateGrad``.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:
        # What the engine says of a leaf that torch.autograd.grad captures; of any other leaf it says False.
        return True


#: Within a backward: whether the graph is retained. A torch that does not tell is taken to retain it.
keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)


def has_hooks(leaf: Tensor) -> bool:
    """Whether the user registered hooks on a leaf: on its gradient, or to run after it has accumulated."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined, unused-ignore]


@contextlib.contextmanager
def hidden_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, autograd accumulates into the leaves without running their hooks."""
    hooked: list[Any] = [leaf for leaf in leaves if has_hooks(leaf)]
    hidden = [(leaf, leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in hooked]
    try:
        for leaf, _, _ in hidden:
            # An empty mapping: None takes the name away, but not what the engine runs.
            leaf._backward_hooks, leaf._post_accumulate_grad_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for leaf, on_gradient, after_accumulation in hidden:
            leaf._backward_hooks = on_gradient
            leaf._post_accumulate_grad_hooks = after_accumulation


def run_hooks_with_gradient_only(leaf: Tensor) -> None:
    """Within a backward, until it ends: the hooks of a leaf run only if a gradient arrives there.

    Autograd runs the hooks of every leaf that it passes, also where it brings none.
    """
    leaf_: Any = leaf
    on_gradient, after_accumulation = leaf_._backward_hooks, leaf_._post_accumulate_grad_hooks
    arrived: list[Tensor] = []

    def gradient_hooks(gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            arrived.append(gradient)
            for hook in list((on_gradient or {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
        return gradient

    def accumulation_hooks(parameter: Tensor) -> None:
        if arrived:
            arrived.clear()
            for hook in list((after_accumulation or {}).values()):
                hook(parameter)

    def restore() -> None:
        leaf_._backward_hooks, leaf_._post_accumulate_grad_hooks = on_gradient, after_accumulation or OrderedDict()

    leaf_._backward_hooks = OrderedDict({0: gradient_hooks})
    leaf_._post_accumulate_grad_hooks = OrderedDict({0: accumulation_hooks})
    torch.autograd.Variable._execution_engine.queue_callback(restore)


#: The attributes of a module that hold its hooks by number, and for some of those numbers how they are called.
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
    module: Any = torch.nn.modules.module
    names = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"
    return [getattr(module, name) for name in names]


def outside_of_compiled_graphs(function: F) -> F:
    """``torch.compiler.disable``, which imports the compiler when the function is first called, not before."""
    disabled: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined, unused-ignore]
    return cast(F, disabled)


def uncompiled_hooks(*hooks: Callable[[Any], Any]) -> tuple[Callable[[Any], Any], ...]:
    """Hooks that ``torch.compile`` does not compile, wherever it calls them; as they are if nothing can be compiled.

    Hooks of saved tensors run within the layers, so a compiled layer would compile them, too.
    """
    if "torch._dynamo" not in sys.modules:
        return hooks
    return tuple(functools.partial(_call_uncompiled(), hook) for hook in hooks)


@functools.cache
def _call_uncompiled() -> Callable[..., Any]:
    def call(function: Callable[[Any], Any], argument: Any) -> Any:
        return function(argument)

    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled


def with_subclasses() -> contextlib.AbstractContextManager[Any]:
    """Inside, subclasses of tensors work as in a forward: a backward of a loss of a subclass runs without them."""
    enable = getattr(torch._C, "_EnableTorchFunction", contextlib.nullcontext)
    enabled: bool = torch._C._is_torch_function_enabled()
    return contextlib.nullcontext() if enabled else enable()


def transform_under_way(inputs: Iterable[Tensor]) -> str | None:
    """Name of what differentiates, batches or records a call on ``inputs`` from outside autograd, if anything does."""
    if torch._C._functorch.maybe_current_level() is not None:  # type: ignore[attr-defined, unused-ignore]
        return "a transform of torch.func (grad, jvp, vmap, ...)"
    forward_mode = torch.autograd.forward_ad
    if forward_mode._current_level >= 0 and any(forward_mode.unpack_dual(x).tangent is not None for x in inputs):
        return "forward-mode differentiation (torch.autograd.forward_ad)"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return "torch.export"
    if _fake_tensors_under_way():
        return "fake tensors (FakeTensorMode)"
    return None


def _fake_tensors_under_way() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # type: ignore[attr-defined, unused-ignore]
