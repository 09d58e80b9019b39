"""Global gradient norm for clipping, computed while gradients are offloaded.

Clipping by global norm usually prevents overlap: no update may start before the last gradient, and then all gradients
are read once more. Here the drain lane attaches its norm to each gradient, and ``step()`` combines some hundred
numbers.

Invariant: an attached norm is valid only for that tensor object, and only until the first write to it. A gradient
without a valid norm is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from offload.storage.contract import in_order
from pipe.torch_private.tensors import norms_of_all

__all__ = [
    "attach_norm",
    "attached_norm",
    "detach_norm",
    "norm_of",
    "norm_of_pieces",
    "norms_of",
    "pieces_of",
    "total_norm",
]

#: Elements of a gradient that are rounded at a time: few megabytes, and few calls of a disk.
PIECE = 1 << 20

_ATTRIBUTE = "_gradstream_norm"


def pieces_of(gradient: Tensor) -> Iterator[Tensor]:
    """Parts of a dense gradient that are rounded and stored one after the other; flat."""
    flat = in_order(gradient)
    return iter(flat.split(PIECE) if flat.numel() else (flat,))


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm, as ``clip_grad_norm_`` computes it, in float32 at least; of 16 bits that of its :func:`pieces_of`."""
    if gradient.dtype not in (torch.bfloat16, torch.float16):
        norm: Tensor = torch.linalg.vector_norm(gradient.detach())
        return norm
    dense = gradient.layout is torch.strided and torch.empty_like(gradient, device="meta").stride() == gradient.stride()
    pieces = pieces_of(gradient) if dense else (gradient.detach(),)
    return norm_of_pieces(torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces)


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """:func:`norm_of` each, as ``clip_grad_norm_`` computes many: together, where no type or layout is special."""
    plain = [g.detach() for g in gradients if g.dtype in (torch.float32, torch.float64) and g.layout is torch.strided]
    if len(plain) < len(gradients):
        return [norm_of(gradient) for gradient in gradients]
    return norms_of_all(plain) if plain else []


def norm_of_pieces(norms: Iterable[Tensor]) -> Tensor:
    """The 2-norm of a gradient, from those of its parts."""
    each = list(norms)
    norm: Tensor = each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each))
    return norm


def attach_norm(gradient: Tensor, norm: Tensor) -> None:
    """Attaches a norm to a gradient, after the last write to it."""
    setattr(gradient, _ATTRIBUTE, (id(gradient), gradient._version, norm))


def attached_norm(gradient: Tensor) -> Tensor | None:
    """The attached norm, or None if there is none or the gradient was written to since."""
    identity, version, norm = getattr(gradient, _ATTRIBUTE, (0, 0, None))
    # A deep copy has its original's attributes. Without the identity, it would have the original's norm.
    return norm if identity == id(gradient) and version == gradient._version else None


def detach_norm(gradient: Tensor) -> None:
    """Removes the norm, before a write that does not increment the gradient's version."""
    if hasattr(gradient, _ATTRIBUTE):
        delattr(gradient, _ATTRIBUTE)


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, from the norm of each."""
    if not norms:
        return torch.zeros(())
    devices = {norm.device for norm in norms}
    if len(devices) > 1:  # one copy from each device, in the order of the gradients
        each = {d: iter(torch.stack([norm for norm in norms if norm.device == d]).cpu()) for d in devices}
        norms = [next(each[norm.device]) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack([*norms]))
    return total
