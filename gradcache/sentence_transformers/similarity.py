"""Cosines of every pair of rows, and names of similarities for a model card."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradcache.tiled_loss import wide

__all__ = ["cos_sim", "name_of", "precise_cos_sim"]


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every pair of rows, (rows of a, rows of b)."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def precise_cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """:func:`cos_sim` in at least 32 bits, under autocast as well: for losses that compare cosines."""
    with torch.autocast(a.device.type, enabled=False):
        return cos_sim(a.to(wide(a.dtype)), b.to(wide(b.dtype)))


def name_of(function: Any) -> str:
    """The name of a similarity, with the arguments that are bound to it."""
    if isinstance(function, partial):
        given = ", ".join(f"{name}={value!r}" for name, value in function.keywords.items())
        return f"{name_of(function.func)}({given})" if given else name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
