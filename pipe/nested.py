"""Flattens nested values (tuple, list, dict, named tuple, registered container) into leaves, and rebuilds them.

Layers pass more than one tensor to each other. Code that handles each tensor separately (saving, moving, splitting,
matching gradients) flattens the value here, works on the leaves and rebuilds the same structure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipe.torch_private import is_traceable_wrapper_subclass, pytree

__all__ = ["COMPRESSED", "TreeSpec", "flatten", "map_distinct", "map_tensors", "parts_of", "tensors_in", "unflatten"]

TreeSpec = pytree.TreeSpec
MapTensors = Callable[[Callable[[Tensor], Any], Any], Any]

# Fast paths for the two structures that most cells pass to each other: one tensor, and one tensor with an empty list
# (of skip tensors). The general flattening takes as long as a small layer.
_LEAF: TreeSpec = pytree.tree_flatten(None)[1]
_LEAF_AND_NONE: TreeSpec = pytree.tree_flatten((None, []))[1]

#: Sparse layouts of compressed rows or columns.
COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested value in a fixed order, and the structure that :func:`unflatten` needs."""
    if isinstance(value, Tensor):
        return [value], _LEAF
    if _is_leaf_and_none(value):
        return [value[0]], _LEAF_AND_NONE
    return pytree.tree_flatten(value)


def _is_leaf_and_none(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) == 2
        and type(value[1]) is list
        and not value[1]
        and isinstance(value[0], Tensor)
    )


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The nested value of structure ``spec`` with these ``leaves``."""
    if spec is _LEAF:
        return leaves[0]
    if spec is _LEAF_AND_NONE:
        return leaves[0], []
    return pytree.tree_unflatten(leaves, spec)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in the order of :func:`flatten`."""
    if isinstance(value, Tensor):
        return [value]
    if _is_leaf_and_none(value):
        return [value[0]]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


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
    """The same structure with ``function`` applied to every tensor; other leaves stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def map_distinct(function: Callable[[Tensor], Any], value: Any, mapping: MapTensors = map_tensors) -> Any:
    """``mapping`` that applies ``function`` once to a tensor that occurs several times.

    All occurrences get the same result object, so an in-place write to one is visible in the others, as it is in
    ``value``.
    """
    mapped: dict[int, Any] = {}

    def once(tensor: Tensor) -> Any:
        if id(tensor) not in mapped:
            mapped[id(tensor)] = function(tensor)
        return mapped[id(tensor)]

    return mapping(once, value)
