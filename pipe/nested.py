"""Flattens nested values (tuple, list, dict, named tuple, registered container) into leaves, and rebuilds them.

Layers pass more than one tensor to each other. Code that handles each tensor separately (saving, moving, splitting,
matching gradients) flattens the value here, works on the leaves and rebuilds the same structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    "map_distinct",
    "map_tensors",
    "map_together",
    "parts_of",
    "requires_grad",
    "tensors_in",
    "unflatten",
]

TreeSpec = pytree.TreeSpec
MapTensors = Callable[[Callable[[Tensor], Any], Any], Any]

# Fast paths for the structures that most cells pass to each other: one tensor, one tensor with an empty list (of skip
# tensors), the (args, kwargs) of a call, and a list of one of these. The general flattening takes as long as a small
# layer.
_LEAF: TreeSpec = pytree.tree_flatten(None)[1]
_LEAF_AND_NONE: TreeSpec = pytree.tree_flatten((None, []))[1]

#: Types of leaves that a call has in the fast path; another type takes the general one.
LEAVES: set[type] = {Tensor, nn.Parameter, type(None), bool, int, float, str}
_NAMES = {str}
#: Number of positional arguments, names of the others, and for each argument the length of a tuple, or None for a leaf.
_Call = tuple[int, tuple[Any, ...], tuple[int | None, ...]]
#: Structures of calls, and the call of each by the id of its structure.
_specs: dict[_Call, TreeSpec] = {}
_calls: dict[int, _Call] = {}
#: By the id of a structure: that of a list of one such value, and the other way round.
_lists: dict[int, TreeSpec] = {}
_members: dict[int, TreeSpec] = {}
#: A program has a few; one that makes up names of arguments takes the general path from here on.
_MOST_CALLS = 512

#: Sparse layouts of compressed rows or columns.
COMPRESSED = {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a nested value in a fixed order, and the structure that :func:`unflatten` needs."""
    if isinstance(value, Tensor):
        return [value], _LEAF
    if _is_leaf_and_none(value):
        return [value[0]], _LEAF_AND_NONE
    if type(value) is list and len(value) == 1 and (isinstance(value[0], Tensor) or _flat_call(value[0])):
        leaves, inner = flatten(value[0])
        spec = _lists.get(id(inner))
        if spec is None:
            spec = pytree.tree_flatten(value)[1]
            if inner is _LEAF or _is_fast_call(inner):
                _members[id(spec)] = inner
                _lists[id(inner)] = spec
        return leaves, spec
    found = _flat_call(value)
    if found is None:
        return pytree.tree_flatten(value)
    leaves, call = found
    spec = _specs.get(call)
    if spec is None:
        spec = pytree.tree_flatten(value)[1]
        if len(_specs) < _MOST_CALLS:
            _calls[id(spec)] = call  # before the structure is used by others
            spec = _specs.setdefault(call, spec)
    return leaves, spec


def _flat_call(value: Any) -> tuple[list[Any], _Call] | None:
    """The leaves and the structure of the (args, kwargs) of a call, if it has only leaves and tuples of them."""
    if type(value) is not tuple or len(value) != 2 or type(value[0]) is not tuple or type(value[1]) is not dict:
        return None
    args, kwargs = value
    if not _NAMES.issuperset(map(type, kwargs)):
        return None  # 1 and True would be one name
    leaves: list[Any] = []
    lengths: list[int | None] = []
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind in LEAVES:
            leaves.append(x)
            lengths.append(None)
        elif kind is tuple and LEAVES.issuperset(map(type, x)):
            leaves += x
            lengths.append(len(x))
        else:
            return None
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def _joined_call(leaves: list[Any], call: _Call) -> Any:
    count, names, lengths = call
    values = leaves
    if lengths.count(None) < len(lengths):
        values, at = [], 0
        for n in lengths:
            values.append(leaves[at] if n is None else tuple(leaves[at : at + n]))
            at += 1 if n is None else n
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


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
    inner = _members.get(id(spec))
    if inner is not None and _lists.get(id(inner)) is spec:
        return [unflatten(leaves, inner)]
    if _is_fast_call(spec) and len(leaves) == spec.num_leaves:
        return _joined_call(leaves, _calls[id(spec)])
    return pytree.tree_unflatten(leaves, spec)


def _is_fast_call(spec: TreeSpec) -> bool:
    call = _calls.get(id(spec))
    return call is not None and _specs.get(call) is spec


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in the order of :func:`flatten`."""
    if isinstance(value, Tensor):
        return [value]
    if _is_leaf_and_none(value):
        return [value[0]]
    found = _flat_call(value)
    return [leaf for leaf in (pytree.tree_leaves(value) if found is None else found[0]) if isinstance(leaf, Tensor)]


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of an object's own attributes, those in slots included."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            own = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, own):
                yield own, getattr(value, own)


def holder_in(value: Any, *, needs_grad: bool = False) -> Any:
    """The first leaf that is no tensor and has tensors as attributes (that need a gradient), or None."""
    if isinstance(value, Tensor):
        return None
    for leaf in flatten(value)[0]:
        if type(leaf) not in LEAVES and not isinstance(leaf, (Tensor, nn.Module, type)):
            held = tensors_in([item for _, item in attributes_of(leaf)])
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
    """The same structure with ``function`` applied to every tensor; other leaves stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    found = _flat_call(value)
    if found is not None:
        leaves, call = found
        return _joined_call([function(x) if isinstance(x, Tensor) else x for x in leaves], call)
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def requires_grad(tensor: Tensor) -> bool:
    """Whether it needs a gradient."""
    return tensor.requires_grad


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
