"""Private names of autograd: the running backward, hooks of leaves, saved-tensor hooks, modes and version counters."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HiddenHooks",
    "SavedTensorHooks",
    "accumulates_everywhere",
    "at_end_of_backward",
    "backward_number",
    "has_hooks",
    "in_backward",
    "is_requested",
    "keeps_graph",
    "not_differentiable",
    "outside_inference_mode",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "run_hooks_with_gradient_only",
    "saved_tensor_hooks",
    "set_sequence_numbers",
    "will_run",
]


SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


_autograd: Any = torch._C._autograd


def in_backward() -> bool:
    """Whether this thread is running a backward."""
    return torch._C._current_graph_task_id() != -1


#: The number of the backward that this thread is running; -1 outside of any.
backward_number: Callable[[], int] = torch._C._current_graph_task_id


#: Within a backward: calls a function when it ends.
at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

#: Within a backward: whether it accumulates into ``.grad`` of every leaf: not inside ``torch.autograd.grad`` and
#: ``backward(inputs=...)``.
accumulates_everywhere: Callable[[], bool] = torch.autograd._is_checkpoint_valid  # type: ignore[attr-defined, unused-ignore]

#: Within a backward: whether it runs a node of the graph that is not of a leaf.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node  # type: ignore[attr-defined, unused-ignore]


def is_requested(node: Any) -> bool:
    """Within ``torch.autograd.grad`` or ``backward(inputs=...)``: whether a leaf's node was requested."""
    try:
        return will_run(node)
    except RuntimeError:
        # The engine raises for a leaf that torch.autograd.grad captures, and returns False for any other leaf.
        return True


#: Within a backward: whether the graph is retained. Releases without this function are assumed to retain it.
keeps_graph: Callable[[], bool] = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)


def not_differentiable(tensor: Tensor, error: str) -> Tensor:
    """The tensor with a graph whose backward raises RuntimeError with this text."""
    marked: Tensor = torch._C._functions.DelayedError(error.encode(), 1)(tensor.detach().requires_grad_())  # type: ignore[attr-defined, unused-ignore]
    return marked


def has_hooks(leaf: Tensor) -> bool:
    """Whether the user registered hooks on a leaf: on its gradient, or after accumulation.

    Those that ``_apply_optimizer_in_backward`` hangs on the node that accumulates are known by their optimizers only.
    """
    on_node = "_in_backward_optimizers" in leaf.__dict__
    return bool(on_node or leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined, unused-ignore]


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


def set_sequence_numbers(tensors: Iterable[Tensor], known: set[Any]) -> None:
    """Gives the nodes that made ``tensors`` the present sequence number of this thread, except those before ``known``.

    Autograd runs ready nodes by these numbers, the latest first. Adds the nodes to ``known``.
    """
    number = _autograd._get_sequence_nr()
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in known or node.name() == "torch::autograd::AccumulateGrad":
            continue
        known.add(node)
        node._set_sequence_nr(number)
        nodes += [following for following, _ in node.next_functions]


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


#: Makes saved-tensor hooks the active ones.
push_saved_tensor_hooks: Callable[..., None] = _autograd._push_saved_tensors_default_hooks
#: Removes the active saved-tensor hooks.
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
