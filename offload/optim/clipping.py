"""The factor by which a step multiplies all gradients: ``clip_grad_norm_``, and the scale of a ``GradScaler``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload.streaming.grad_norm import attached_norm, norm_of, total_norm

if TYPE_CHECKING:
    from offload.mesh.public import PublicParameters

__all__ = ["clip_coefficient"]


def clip_coefficient(
    public: PublicParameters,
    groups: Iterable[Mapping[str, Any]],
    max_norm: float,
    scale: Tensor | None,
    *,
    trusted: bool,
) -> tuple[Tensor, Tensor | None]:
    """The global norm of the gradients, before clipping; and their factor, None for 1.

    ``scale`` multiplies the gradients as they are. ``trusted``: whether the norms that came with them are still theirs.
    """
    stored = public.local(p for group in groups for p in group["params"])
    grads = [p.grad for p in stored if p.grad is not None]
    trusted &= not public.sharded  # a write to a DTensor does not increment the version of what it shows
    attached = [attached_norm(grad) if trusted else None for grad in grads]
    norms = [norm_of(g) if norm is None else norm for g, norm in zip(grads, attached, strict=True)]
    total = public.total_norm(total_norm(norms))
    if scale is not None:
        total = total / scale.to(total)
    # As in torch.nn.utils.clip_grad_norm_.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if scale is not None:
        coefficient = coefficient / scale.to(coefficient)
    # What is on a device is not waited for.
    return total, None if coefficient.device.type == "cpu" and float(coefficient) == 1 else coefficient
