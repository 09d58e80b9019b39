"""GradCache as decorators, for training loops that call their models themselves on the chunks of a batch.

::

    @cached
    def encode(model, batch):                       # any function that calls models and returns representations
        return model(**batch).pooler_output

    @cat_input_tensor
    def loss_fn(x, y): ...

    x, again_x = encode(model, batch)               # first pass: a leaf, and the closure of its second pass
    ...
    loss_fn(xs, ys).backward()                      # lists of leaves; fills leaf.grad
    for leaf, again in zip(xs, agains_x):
        again(leaf)                                 # second pass: fills the gradients of what encode used

If the closures run inside :class:`gradcache.Accumulation`, gradients of parameters narrower than 32 bits are summed in
float32, and hooks of parameters run once, on the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.distributed import gather_own
from gradcache.two_pass import first_pass, repeatable
from gradcache.used_modules import UsedModules
from pipe.nested import flatten, tensors_in
from pipe.recompute.thread_state import restores_thread_state

__all__ = ["cached", "cat_input_tensor", "gather_input_tensor"]

Result = TypeVar("Result")


def cached(func: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Decorates a function that calls models: a call runs its first pass and also returns a closure for the second.

    Args:
        func: returns a tensor, a tuple or list of tensors, or a dict of tensors.

    Returns:
        A function that returns the representations as leaves (one tensor, several, or one dict) and, last, a closure.
        Call the closure with the leaves, as they were returned, after the loss's backward: it runs ``func`` again with
        the same random numbers on every device, the same autocast and the same buffers, and backward from the leaves'
        gradients. If no leaf has a gradient, it does nothing. Buffers of the modules that ``func`` uses (found in
        arguments, closure, ``self`` and its attributes, globals it names) are updated once.
    """

    @wraps(func)
    @restores_thread_state
    def encode(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        def call(chunk: Any) -> Any:
            return func(*chunk[0], **chunk[1])

        # The arguments are treated as a chunk: copied if func writes into them in place.
        layers = repeatable(nn.ModuleList(UsedModules(args, kwargs, func).modules))
        output, state = first_pass(layers, (args, kwargs), call, tensors_in((args, kwargs)))
        leaves = representations.as_leaves(output)

        @wraps(func)
        @restores_thread_state
        def again(*cached_representations: Any) -> None:
            given = cached_representations[0] if len(cached_representations) == 1 else cached_representations
            gradient = _matching_gradient(output, given)
            if representations.has_gradient(gradient):
                state.second_pass((args, kwargs), call, gradient)

        return (*leaves, again) if isinstance(leaves, (tuple, list)) else (leaves, again)

    return encode


def _matching_gradient(output: Any, given: Any) -> Any:
    """The gradients of the leaves that were passed to the closure, in the structure of the function's output."""
    (mine, spec), theirs = flatten(output), flatten(given)[0]
    shapes = [[tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves] for leaves in (mine, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"expected the representations that the first pass returned, of shapes {shapes[0]}, got {shapes[1]}; "
            f"call each closure with the leaves of the same call"
        )
    return representations.with_leaves([t.grad if isinstance(t, Tensor) else None for t in theirs], spec)


def cat_input_tensor(func: Callable[..., Result]) -> Callable[..., Result]:
    """Concatenates every argument that is a list of tensors along dimension 0, positional or keyword.

    For a loss over the representations of several cached calls: their leaves are collected in lists.
    """

    concatenates = _of_changed(func, _cat)

    @wraps(func)
    def joined(*args: Any, **kwargs: Any) -> Result:
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
        with representations.naming(type(item) for value in lists for item in value if isinstance(item, Mapping)):
            return concatenates(*args, **kwargs)

    return joined


def _cat(value: Any) -> Any:
    is_tensors = isinstance(value, list) and bool(value) and all(isinstance(item, Tensor) for item in value)
    return torch.cat(value) if is_tensors else value


def gather_input_tensor(func: Callable[..., Any] | None = None, axis: int = 0) -> Callable[..., Any]:
    """Gathers every tensor argument from all processes along ``axis``, positional or keyword.

    Use as ``@gather_input_tensor`` or ``@gather_input_tensor(axis=1)``. Only this process's part gets gradients; a loss
    over the gathered tensors is the whole loss in every process, so if DistributedDataParallel averages gradients
    afterwards, multiply the loss by the world size. Processes may pass different sizes along ``axis``.
    """
    if func is None:
        return partial(gather_input_tensor, axis=axis)

    return _of_changed(func, lambda value: gather_own(value, axis) if isinstance(value, Tensor) else value)


def _of_changed(func: Callable[..., Result], change: Callable[[Any], Any]) -> Callable[..., Result]:
    """The function of its arguments, each changed."""

    @wraps(func)
    def changed(*args: Any, **kwargs: Any) -> Result:
        return func(*map(change, args), **{name: change(value) for name, value in kwargs.items()})

    return changed
