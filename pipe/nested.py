"""Nested values: any tuple, list, dict, named tuple or registered container, seen as a flat list of leaves.

Layers pass more than one tensor to each other. Everything that must treat each tensor on its own (saving, moving,
splitting, matching gradients) flattens here, works on the leaves and puts the same structure back together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["TreeSpec", "flatten", "map_tensors", "tensors_in", "unflatten"]

TreeSpec = pytree.TreeSpec

_LEAF: TreeSpec = pytree.tree_flatten(None)[1]


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested value in a fixed order, and the structure that :func:`unflatten` needs."""
    if isinstance(value, Tensor):  # what most layers pass to each other, and most micro-batches are
        return [value], _LEAF
    return pytree.tree_flatten(value)


def unflatten(leaves: list[Any], spec: TreeSpec) -> Any:
    """The nested value of structure ``spec`` with these ``leaves``."""
    if spec is _LEAF:
        return leaves[0]
    return pytree.tree_unflatten(leaves, spec)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in the order of :func:`flatten`."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with ``function`` applied to every tensor; other leaves stay as they are."""
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
