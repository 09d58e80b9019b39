"""Concatenates the representations of all chunks for the loss, and splits the loss's gradient into chunks again.

A tower may return one tensor, or a tuple or dict of them. The gradient is split by the number of rows that each chunk
*returned*, not by the requested chunk size, so a split function may return chunks of any size. A chunk that returns
another number of rows than it was given is refused, unless a split function of the user decides what a row is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gradcache.autograd_node import Gradients, with_backward
from pipe.gradients import leaves_of
from pipe.microbatch import gather_nested
from pipe.nested import TreeSpec, flatten, map_tensors, tensors_in, unflatten

__all__ = [
    "Joined",
    "as_leaves",
    "attach",
    "backward",
    "check",
    "detached",
    "gradients",
    "has_gradient",
    "naming",
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
    check(representation)
    return next(tensor.size(0) for tensor in tensors_in(representation))


def check(representation: Any) -> None:
    """Raises TypeError or ValueError unless a representation has tensors, all with the same number of rows."""
    if isinstance(representation, Tensor) and representation.dim():
        return
    if not tensors_in(representation):
        raise TypeError(
            f"expected a model to return representations (a tensor, or tensors in a tuple or dict), got "
            f"{type(representation).__name__}; pass get_rep_fn to select them from the model's output, or let "
            f"a cached function return them"
        )
    members = {name: leaf for name, leaf in _named(representation) if isinstance(leaf, Tensor)}
    for name, tensor in members.items():
        if tensor.dim() == 0:
            raise ValueError(
                f"expected representations of shape (rows, ...), got a 0-dimensional tensor ({name}); leave it out by "
                f"get_rep_fn (a loss may read a parameter, such as a logit_scale, from the model), or return one per "
                f"row"
            )
    if len({tensor.size(0) for tensor in members.values()}) > 1:
        shapes = ", ".join(f"{tuple(tensor.shape)} ({name})" for name, tensor in members.items())
        raise ValueError(
            f"expected representations with the same number of rows, got shapes {shapes}; pass get_rep_fn to select "
            f"those with one row for each row of the input"
        )


@contextlib.contextmanager
def naming(kinds: Iterable[type]) -> Iterator[None]:
    """A context for a loss: its error names these types of representations, which are no tensors and may cause it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        if not (names := dict.fromkeys(kind.__name__ for kind in kinds)):
            raise
        raise TypeError(
            f"expected a loss of what the models return, got {type(error).__name__}: {error} for representations of "
            f"type {', '.join(names)}; pass get_rep_fn to select tensors from a model's output, or let a cached "
            f"function return them, or read its members in the loss"
        ) from error


def _named(representation: Any) -> list[tuple[str, Any]]:
    """The leaves in the order of :func:`pipe.nested.flatten`, with the names of their members."""
    leaves = flatten(representation)[0]
    named = list(_members(representation, "output"))
    if len(named) == len(leaves) and all(a is b for (_, a), b in zip(named, leaves, strict=True)):
        return named
    return [(f"leaf {k} of the output", leaf) for k, leaf in enumerate(leaves)]


def _members(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for k, item in enumerate(value):
            yield from _members(item, f"{name}[{k}]")
    else:
        yield name, value


class Joined:
    """Joins the representations of a tower's chunks, each of which is checked when it is added.

    Args:
        given: rows of the input of each chunk; None where they are not known, or there is one chunk.
        exactly: raise ValueError for a chunk that returns another number of rows than it was given. Joined chunk after
            chunk, such rows may be in another order than those of the whole batch (views of all rows, one after the
            other), or others (pooled over a chunk). If False, only if each chunk returns the same multiple.
    """

    def __init__(self, given: Sequence[int | None], *, exactly: bool = True) -> None:
        self._given = list(given)
        self._exactly = exactly
        self._values: list[Any] = []
        #: Rows of each chunk's representation.
        self.rows: list[int] = []

    def add(self, representation: Any) -> None:
        """Adds the representation of the next chunk, detached."""
        rows, given = rows_in(representation), self._given[len(self.rows)]
        if self._values:
            self._compare(representation)
        if self._exactly and given is not None and rows != given:
            self._refuse(rows, given)
        self._values.append(representation)
        self.rows.append(rows)

    def value(self) -> Any:
        """The representations of all chunks together. Frees those of single chunks."""
        first = self._given[0]
        multiple = self.rows[0] // first if first else 1
        expected = [None if given is None else multiple * given for given in self._given]
        # Views of a single row are in the order of the whole batch.
        if multiple > 1 and self.rows == expected and max(self.rows) > multiple:
            self._refuse(self.rows[0], first or 0)
        values, self._values = self._values, []
        return gather_nested(values)

    def _refuse(self, rows: int, given: int) -> None:
        expected = f"expected one row of representations for each row of a chunk, got {rows} for {given} rows"
        if given and rows and rows % given == 0:
            raise ValueError(
                f"{expected}: joined chunk after chunk, they may be in another order than those of the whole batch; "
                f"return shape (rows, {rows // given}, ...), for a model that returns {rows // given} views one after "
                f"the other by get_rep_fn=lambda out: out.unflatten(0, ({rows // given}, -1)).transpose(0, 1), and "
                f"take the views apart in loss_fn"
            )
        raise ValueError(
            f"{expected}: joined chunk after chunk, they may be others than those of the whole batch; return one for "
            f"each row, and pool or select rows in loss_fn; or pass a split_input_fn of your own, if they are right"
        )

    def _compare(self, representation: Any) -> None:
        """Raises unless a representation can be joined to the first one."""
        (first, structure), (leaves, own) = flatten(self._values[0]), flatten(representation)
        chunk = len(self._values)
        if own != structure:
            names = [", ".join(name for name, _ in _named(value)) for value in (representation, self._values[0])]
            raise ValueError(
                f"expected representations of the same structure from every chunk, got {names[0]} from chunk {chunk} "
                f"and {names[1]} from chunk 0; pass get_rep_fn to select what all of them have"
            )
        for a, b, (name, _) in zip(first, leaves, _named(representation), strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if a.shape[1:] != b.shape[1:]:
                    raise ValueError(
                        f"expected representations of the same width from every chunk, got shape {tuple(b.shape)} "
                        f"({name}) from chunk {chunk} and {tuple(a.shape)} from chunk 0; pad all chunks to one "
                        f"length, in process_fn or in get_rep_fn, or select other members by get_rep_fn"
                    )
            elif a is not b and not _equal(a, b):
                raise ValueError(
                    f"expected representations that are tensors, got a {type(b).__name__} ({name}) that differs "
                    f"between chunks; pass get_rep_fn to select the representations from the model's output"
                )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # arrays, which compare by element
        return False


def as_leaves(representation: Any) -> Any:
    """The same values as leaves of a new graph; integer tensors need no gradient."""
    return map_tensors(_as_leaf, representation)


def _as_leaf(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if _is_differentiable(tensor) else tensor


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


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


def backward(outputs: Iterable[Any], gradients: Iterable[Any]) -> None:
    """Runs one backward from representations, with a gradient of the structure of each (None: it has none).

    Gradients are passed to autograd directly. A surrogate loss (the dot product of the two) would round them once more,
    and fail if their types differ.
    """
    pairs = [
        (output, gradient)
        for representation, given in zip(outputs, gradients, strict=True)
        if given is not None
        for output, gradient in zip(flatten(representation)[0], flatten(given)[0], strict=True)
        if isinstance(gradient, Tensor) and isinstance(output, Tensor) and output.requires_grad
    ]
    push([output for output, _ in pairs], [gradient for _, gradient in pairs])


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
    leaves = list(leaves_of(*outputs))
    found = torch.autograd.grad(list(outputs), leaves, list(gradients), allow_unused=True)
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            continue
        # A clone, since one tensor may be the gradient of several leaves.
        leaf.grad = gradient.clone() if leaf.grad is None else leaf.grad + gradient
        for hook in list((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(leaf)


def attach(
    encoded: Sequence[Any],
    differentiable: Sequence[bool],
    inputs: Sequence[Tensor],
    second_pass: Callable[[Any], Gradients] | None,
) -> tuple[Any, ...]:
    """The representations ``encoded``, one nested value per tower, with a graph if the tower is ``differentiable``.

    They are the outputs of one autograd node, whose backward runs the second pass, for training loops that call
    ``loss.backward()`` themselves::

        inputs --> [encoded in chunks] --> representations --> any loss, any further graph --> loss.backward()
                         |                                                                         |
                         '---- second pass, chunk by chunk  <---- gradient of the representations -'

    The node keeps the states of the first pass; backward through it may run once, as with ``retain_graph=False``.

    ``second_pass`` gets the gradient of ``encoded`` (None where there is none), and returns those of ``inputs``.
    """
    towers = [flatten(tower) for tower in encoded]
    structures = [structure for _, structure in towers]
    marked = [
        [(leaf, wants and _is_differentiable(leaf)) for leaf in leaves]
        for (leaves, _), wants in zip(towers, differentiable, strict=True)
    ]
    wanted = [[wants for _, wants in tower] for tower in marked]
    chosen = [leaf.detach() for tower in marked for leaf, wants in tower if wants]
    if not chosen:
        return tuple(encoded)

    def backward(gradients: Gradients) -> Gradients:
        nonlocal second_pass
        if second_pass is None:
            raise RuntimeError("expected one backward through representations in chunks; encode the batch again")
        run, second_pass = second_pass, None  # frees the states of the first pass
        given = iter(gradients)
        # By structures, not from the representations: a loss that is kept would keep these.
        parts = [[next(given) if wants else None for wants in row] for row in wanted]
        return None, *run(list(map(with_leaves, parts, structures)))

    # An input that needs a gradient, so that the node is in a graph even if no other input needs one.
    root = torch.empty(0, requires_grad=True)
    # Several tensors of one tower may have shared memory, which those of all chunks together do not.
    writable = sum(map(len, wanted)) == len(encoded)
    attached = iter(with_backward(chosen, [root, *inputs], backward, writable=writable))
    values = [[next(attached) if wants else leaf for leaf, wants in tower] for tower in marked]
    return tuple(map(unflatten, values, structures))
