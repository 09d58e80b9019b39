"""Concatenates the representations of all chunks for the loss, and splits the loss's gradient into chunks again.

A tower may return one tensor, or a tuple or dict of them. The gradient is split by the number of rows that each chunk
*returned*, not by the requested chunk size, so a split function may return chunks of any size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gradcache.used_modules import leaves_of
from pipe.microbatch import rows_of
from pipe.nested import TreeSpec, flatten, map_tensors, tensors_in, unflatten

__all__ = [
    "as_leaves",
    "backward",
    "detached",
    "gradients",
    "greatest_difference",
    "has_gradient",
    "past_accumulation_hooks",
    "push",
    "rows_in",
    "split_gradients",
    "with_leaves",
]


def detached(representation: Any) -> Any:
    """The representation without its graph; views of a larger storage are copied.

    ``hidden[:, 0]`` is a view: it would keep all of ``hidden`` alive for every chunk of the batch.
    """
    return map_tensors(_detached, representation)


def _detached(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def rows_in(representation: Any) -> int:
    """Rows of one chunk's representation; raises if it has no tensor, a tensor without rows, or unequal rows."""
    tensors = tensors_in(representation)
    if not tensors:
        raise TypeError(
            f"expected a model to return representations (a tensor, or tensors in a tuple or dict), got "
            f"{type(representation).__name__}; pass get_rep_fn to select them from the model's output"
        )
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            "expected representations of shape (rows, ...), got a 0-dimensional tensor; return one per row"
        )
    return rows_of(tensors)


def as_leaves(representation: Any) -> Any:
    """The same values as leaves of a new graph; integer tensors need no gradient."""
    return map_tensors(_as_leaf, representation)


def _as_leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def gradients(representation: Any) -> Any:
    """The ``.grad`` of every tensor of :func:`as_leaves` in the same structure; None if the loss did not use it."""
    leaves, spec = flatten(representation)
    return with_leaves([leaf.grad if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def with_leaves(gradients: list[Any], spec: TreeSpec) -> Any:
    """Gradients in the structure of a representation; as a list, if that structure drops None (ModelOutput)."""
    value = unflatten(list(gradients), spec)
    return value if len(flatten(value)[0]) == len(gradients) else gradients


def has_gradient(gradient: Any) -> bool:
    """Whether any tensor of a representation has a gradient."""
    return bool(tensors_in(gradient))


def split_gradients(gradient: Any, rows: Sequence[int]) -> list[Any]:
    """Splits the gradient of a whole batch by these numbers of ``rows``; a list of None if there is no gradient."""
    if not has_gradient(gradient):
        return [None] * len(rows)
    leaves, spec = flatten(gradient)
    columns = [leaf.split(list(rows)) if isinstance(leaf, Tensor) else (leaf,) * len(rows) for leaf in leaves]
    return [with_leaves([column[i] for column in columns], spec) for i in range(len(rows))]


def backward(representation: Any, gradient: Any) -> None:
    """Runs backward from ``representation`` with ``gradient``, which has the same structure.

    The gradient is passed to autograd directly. A surrogate loss (the dot product of the two) would round it once more,
    and fail if their types differ.
    """
    pairs = [
        (output, grad)
        for output, grad in zip(flatten(representation)[0], flatten(gradient)[0], strict=True)
        if isinstance(grad, Tensor) and isinstance(output, Tensor) and output.requires_grad
    ]
    push([output for output, _ in pairs], [grad for _, grad in pairs])


_past_hooks: ContextVar[bool] = ContextVar("past_accumulation_hooks", default=False)


@contextlib.contextmanager
def past_accumulation_hooks() -> Iterator[None]:
    """A context in which :func:`push` adds gradients to ``.grad`` itself, without the hooks of AccumulateGrad nodes.

    For a module whose wrapper (DDP) uses these hooks for another backward. Hooks of the tensors themselves run.
    """
    token = _past_hooks.set(True)
    try:
        yield
    finally:
        _past_hooks.reset(token)


def push(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Runs backward from ``outputs`` with these gradients, into ``.grad`` of the leaves."""
    if not outputs:
        return
    if not _past_hooks.get():
        torch.autograd.backward(list(outputs), list(gradients))
        return
    leaves = list({id(leaf): leaf for leaf in leaves_of(*outputs)}.values())
    leaves += [output for output in outputs if output.is_leaf]
    found = torch.autograd.grad(list(outputs), leaves, list(gradients), allow_unused=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            continue
        if leaf.grad is None:
            leaf.grad = gradient.detach().clone()  # one tensor may be the gradient of several leaves
        elif leaf.grad.layout == gradient.layout:
            leaf.grad.add_(gradient)
        else:
            leaf.grad = leaf.grad + gradient
        for hook in list((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(leaf)


def greatest_difference(first: Any, second: Any) -> float:
    """The greatest absolute difference between two representations of the same structure."""
    pairs = zip(tensors_in(first), tensors_in(second), strict=True)
    return max((float((a.detach() - b.detach()).abs().max()) for a, b in pairs if a.numel()), default=0.0)
