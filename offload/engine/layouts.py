"""Takes tensors of any layout apart into strided tensors, so that boundaries can be stored, and rebuilds them.

A strided tensor is stored as it is. A sparse one (COO, CSR, CSC, BSR, BSC) is its indices and its values, a nested one
of layout ``torch.jagged`` its values; its offsets identify the ragged dimension, so they stay the same objects. Other
tensors (a subclass, an opaque layout) stay in memory, since their parts are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pipe.nested import COMPRESSED

__all__ = ["bytes_of_boundary", "take_apart"]

#: Builds a tensor from parts like its own. It does not hold these.
Join = Callable[..., Tensor]


def take_apart(tensor: Tensor) -> tuple[list[Tensor], Join]:
    """The parts of a detached tensor, strided and of no subclass, and what builds it; none if they are unknown.

    Memory is shared, not copied.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter):
        if tensor.layout is torch.strided:
            return [tensor], _same
        size, layout = tensor.size(), tensor.layout
        if layout is torch.sparse_coo:
            parts = [tensor._indices(), tensor._values()]
            coalesced = tensor.is_coalesced()
            return parts, partial(torch.sparse_coo_tensor, size=size, is_coalesced=coalesced, check_invariants=False)
        if layout in COMPRESSED:
            by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
            outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
            inner = tensor.col_indices() if by_row else tensor.row_indices()
            join = partial(torch.sparse_compressed_tensor, size=size, layout=layout, check_invariants=False)
            return [outer, inner, tensor.values()], join
    if tensor.is_nested and tensor.layout is torch.jagged:
        return _jagged(tensor)
    return [], _same


def _same(part: Tensor) -> Tensor:
    return part


def _jagged(tensor: Tensor) -> tuple[list[Tensor], Join]:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    stay = {name: getattr(tensor, name) for name in names if name != "_values"}
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def join(values: Tensor) -> Tensor:
        joined: Tensor = kind.__tensor_unflatten__({**stay, "_values": values}, context, size, stride)  # type: ignore[attr-defined]
        return joined

    return [tensor.values()], join


def bytes_of_boundary(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse or nested one, those stored, with their indices."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.numel() * tensor.element_size()
    parts, _ = take_apart(tensor)
    return sum(part.numel() * part.element_size() for part in parts) if parts else int(tensor.numel()) * tensor.itemsize
