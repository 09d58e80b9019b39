"""Counts the bytes of tensors of any layout that enter blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pipe.nested import parts_of

__all__ = ["bytes_of_boundary", "is_plain"]

_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
#: What gives the indices of a sparse tensor.
_INDICES = {
    torch.sparse_coo: ("_indices",),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided and of no subclass, so that it can leave memory; others stay."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def bytes_of_boundary(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse or nested one, those stored, with their indices."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.numel() * tensor.element_size()
    parts = [*parts_of(tensor), *(getattr(tensor, name)() for name in _INDICES.get(tensor.layout, ()))]
    return sum(part.numel() * part.element_size() for part in parts) if parts else int(tensor.numel()) * tensor.itemsize
