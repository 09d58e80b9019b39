"""Private names of tensors: the identity and the owners of their memory, and operations on many of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["add_all", "memory_of", "multiply_all", "native_uses", "negative_view", "norms_of_all", "storage_uses"]


def memory_of(tensor: Tensor) -> int:
    """A number that identifies the storage of a tensor while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


#: Multiplies tensors in place by a factor.
multiply_all: Callable[[list[Tensor], Tensor], None] = torch._foreach_mul_
#: Adds to each tensor the other one at its place, in place.
add_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_add_


def norms_of_all(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in few kernels where they are on one device."""
    return list(torch._foreach_norm(tensors))


#: A view of the negated tensor.
negative_view: Callable[[Tensor], Tensor] = torch._neg_view


def storage_uses(tensor: Tensor) -> int:
    """The number of tensors (and other owners) that share the memory of ``tensor``, itself included."""
    storage = tensor.untyped_storage()  # is one more owner
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined, unused-ignore]


def native_uses(tensor: Tensor) -> int:
    """The number of owners of a tensor in C++, its Python object included: graphs, and the parameter of a gradient."""
    return int(tensor._use_count())  # type: ignore[attr-defined, unused-ignore]
