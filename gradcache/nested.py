"""Finds and maps the tensors in nested values, including mappings that torch's pytree treats as leaves.

A tokenizer returns a ``UserDict`` (``BatchEncoding``), which is an opaque leaf to torch. Its tensors would then not be
copied for a model that writes into its input, would get no gradient, and would not be counted.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pipe.torch_private.data import pytree

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, members of mappings of any type included."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(list(leaf.values()))
    return found


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with ``function`` applied to every tensor; a mapping that cannot be copied becomes a dict."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not isinstance(leaf, Mapping):
            return leaf
        members = {key: map_tensors(function, item) for key, item in leaf.items()}
        if not isinstance(leaf, (dict, UserDict)):
            return members
        made: Any = copy.copy(leaf)
        made.update(members)
        return made

    return pytree.tree_map(mapped, value)
