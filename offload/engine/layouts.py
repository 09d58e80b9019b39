"""Takes tensors of any layout apart into strided tensors, so that boundaries can be stored, and rebuilds them.

A strided tensor is stored as it is. A sparse one (COO, CSR, CSC, BSR, BSC) is its indices and its values, a nested one
of layout ``torch.jagged`` its values; its offsets identify the ragged dimension, so they stay the same objects. Other
tensors (a subclass, an opaque layout) stay in memory, since their parts are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipe.nested import COMPRESSED

__all__ = ["Parts", "bytes_of_boundary", "take_apart"]


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor."""

    #: Strided tensors without a graph, of no subclass; empty if the tensor cannot be stored elsewhere.
    tensors: Sequence[Tensor]
    #: Builds the tensor from equal parts. It must not hold these.
    join: Callable[[Sequence[Tensor]], Tensor]


def take_apart(tensor: Tensor) -> Parts:
    """The parts of a detached tensor. Memory is shared, not copied."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        if tensor.layout is torch.strided:
            return Parts([tensor], lambda parts: parts[0])
        if tensor.layout is torch.sparse_coo:
            return _coo(tensor)
        if tensor.layout in COMPRESSED:
            return _compressed(tensor)
    if tensor.is_nested and tensor.layout is torch.jagged:
        return _jagged(tensor)
    return Parts([], lambda parts: tensor)


def _coo(tensor: Tensor) -> Parts:
    size, coalesced = tensor.size(), tensor.is_coalesced()

    def join(parts: Sequence[Tensor]) -> Tensor:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, size, is_coalesced=coalesced, check_invariants=False)

    return Parts([tensor._indices(), tensor._values()], join)


def _compressed(tensor: Tensor) -> Parts:
    size, layout = tensor.size(), tensor.layout
    by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
    outer, inner = (
        (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    )

    def join(parts: Sequence[Tensor]) -> Tensor:
        outer, inner, values = parts
        return torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=False)

    return Parts([outer, inner, tensor.values()], join)


def _jagged(tensor: Tensor) -> Parts:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    stay = {name: getattr(tensor, name) for name in names if name != "_values"}
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def join(parts: Sequence[Tensor]) -> Tensor:
        joined: Tensor = kind.__tensor_unflatten__({**stay, "_values": parts[0]}, context, size, stride)  # type: ignore[attr-defined]
        return joined

    return Parts([tensor.values()], join)


def bytes_of_boundary(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse or nested one, those stored, with their indices."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.numel() * tensor.element_size()
    parts = take_apart(tensor).tensors
    return sum(part.numel() * part.element_size() for part in parts) if parts else int(tensor.numel()) * tensor.itemsize
