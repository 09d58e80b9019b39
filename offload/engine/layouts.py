"""Counts the bytes of tensors of any layout that enter blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pipe.nested import tensors_in

__all__ = ["bytes_of_boundary", "is_plain"]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided and of no subclass, so that it can leave memory; others stay."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def bytes_of_boundary(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse or nested one, those stored, with their indices."""
    if tensor.layout in (torch.strided, torch.jagged):
        return int(tensor.numel()) * tensor.element_size()
    pickled = tensor.detach().__reduce_ex__(2)  # has values and indices, whatever their names in this layout
    return sum(part.numel() * part.element_size() for part in tensors_in(pickled))
