"""Flattens nested values (tuple, list, mapping, named tuple, registered container) into leaves, and rebuilds them.

Layers pass more than one tensor to each other. Code that handles each tensor separately (saving, moving, splitting,
matching gradients) flattens the value here, works on the leaves and rebuilds the same structure.

Mappings that torch's pytree takes for leaves, such as what a tokenizer returns (a ``UserDict``), are containers here.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipe.torch_private.data import pytree
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass

__all__ = [
    "COMPRESSED",
    "LEAVES",
    "TreeSpec",
    "attributes_of",
    "flatten",
    "holder_in",
    "map_tensors",
    "map_together",
    "parts_of",
    "tensors_in",
    "unflatten",
]

#: The structure of a nested value: None for a leaf; for exact tuples, lists, and mappings what makes one, the keys of a
#: mapping, and the structures of the members; pytree's for other containers.
TreeSpec = None | tuple["Callable[[Any], Any]", "list[Any] | None", "list[Any]"] | pytree.TreeSpec

#: Types of most leaves, with which pytree need not be asked.
LEAVES: set[type] = {Tensor, nn.Parameter, type(None), bool, int, float, str}

#: Sparse layouts of compressed rows or columns.
COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested value in a fixed order, and the structure that :func:`unflatten` needs."""
    if isinstance(value, Tensor):
        return [value], None
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def _flatten(value: Any, leaves: list[Any]) -> TreeSpec:
    kind = type(value)
    if kind is tuple or kind is list or kind is dict:
        inner: list[Any] = []
        for x in value.values() if kind is dict else value:
            if type(x) in LEAVES:
                leaves.append(x)
                inner.append(None)
            else:
                inner.append(_flatten(x, leaves))
        return kind, [*value] if kind is dict else None, inner
    if isinstance(value, Tensor):
        leaves.append(value)
        return None
    found, spec = pytree.tree_flatten(value)
    if spec.is_leaf() and isinstance(value, Mapping):
        make = _Like(value) if isinstance(value, (dict, UserDict)) else dict
        return make, [*value], [_flatten(x, leaves) for x in value.values()]
    leaves += found
    return None if spec.is_leaf() else spec


class _Like:
    """Makes mappings like a given one, with the same attributes."""

    def __init__(self, mapping: Any) -> None:
        self._empty = copy.copy(mapping)
        self._empty.clear()

    def __call__(self, items: Any) -> Any:
        made = copy.copy(self._empty)
        made.update(items)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and type(self._empty) is type(other._empty)

    __hash__ = None  # type: ignore[assignment]


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The nested value of structure ``spec`` with these ``leaves``."""
    return leaves[0] if spec is None else _unflatten(iter(leaves), spec)


def _unflatten(leaves: Iterator[Any], spec: TreeSpec) -> Any:
    if isinstance(spec, pytree.TreeSpec):
        return pytree.tree_unflatten([next(leaves) for _ in range(spec.num_leaves)], spec)
    assert spec is not None
    make, names, inner = spec
    members = [next(leaves) if each is None else _unflatten(leaves, each) for each in inner]
    return make(members if names is None else zip(names, members, strict=True))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in the order of :func:`flatten`."""
    return [value] if isinstance(value, Tensor) else [x for x in flatten(value)[0] if isinstance(x, Tensor)]


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's own attributes by name, those in slots included."""
    state = object.__getstate__(value)  # type: ignore[attr-defined, unused-ignore]
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(own or {}), **(slots or {})}


def holder_in(value: Any, *, needs_grad: bool = False) -> Any:
    """The first leaf that is no tensor and has tensors as attributes (that need a gradient), or None."""
    if isinstance(value, Tensor):
        return None
    for leaf in flatten(value)[0]:
        if type(leaf) not in LEAVES and not isinstance(leaf, (Tensor, nn.Module, type)):
            held = tensors_in(attributes_of(leaf))
            if any(tensor.requires_grad or not needs_grad for tensor in held):
                return leaf
    return None


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold the values: itself, or the members of a sparse or nested one, or of a subclass."""
    if tensor.is_nested:
        return [tensor.values()] if tensor.layout is torch.jagged else []
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    return [tensor.values()] if tensor.layout in COMPRESSED else []


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with ``function`` applied to every tensor; other leaves stay as they are.

    A tensor that occurs several times is one in the result, too: an in-place write to it is visible at all of them.
    """
    if isinstance(value, Tensor):
        return function(value)
    leaves, spec = flatten(value)
    distinct = {id(x): x for x in leaves if isinstance(x, Tensor)}
    mapped = {key: function(x) for key, x in distinct.items()}
    return unflatten([mapped.get(id(x), x) for x in leaves], spec)


def map_together(
    function: Callable[..., Iterable[Any]], value: Any, *, only: Callable[[Tensor], bool] | None = None
) -> Any:
    """The same structure with all its tensors (that are in ``only``) replaced by what one call with them returns."""
    leaves, spec = flatten(value)
    where = [k for k, x in enumerate(leaves) if isinstance(x, Tensor) and (only is None or only(x))]
    if not where:
        return value
    for k, tensor in zip(where, function(*[leaves[k] for k in where]), strict=True):
        leaves[k] = tensor
    return unflatten(leaves, spec)
