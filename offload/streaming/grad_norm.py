"""The global norm of all gradients, summed while they travel home.

Clipping by global norm is what costs other systems their overlap: nobody may update before the last gradient is in, and
then all gradients have to be read once more. Here the lane that brings a gradient home notes its norm on it, and
``step()`` only has to put some hundred numbers together.

Invariant: a note counts only for the tensor that carries it, and only until the first write to it. A gradient without a
valid note is read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clip_coefficient", "forget", "norm_of", "note", "noted", "total_norm"]

_NOTE = "_gradstream_norm"


def norm_of(gradient: Tensor) -> Tensor:
    """The 2-norm, as ``clip_grad_norm_`` computes it, in float32 at least."""
    dtype = torch.float32 if gradient.dtype in (torch.bfloat16, torch.float16) else None
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)
    return norm


def note(gradient: Tensor, norm: Tensor) -> None:
    """Notes a norm on the gradient. Called where nobody writes to it any more."""
    setattr(gradient, _NOTE, (id(gradient), gradient._version, norm))


def noted(gradient: Tensor) -> Tensor | None:
    """The norm that was noted, unless the gradient was written to since."""
    identity, version, norm = getattr(gradient, _NOTE, (0, 0, None))
    # A deep copy carries its original's note. Without the identity, it would be taken for its own.
    return norm if identity == id(gradient) and version == gradient._version else None


def forget(gradient: Tensor) -> None:
    """Removes the note: the gradient is about to be written to in ways that torch does not count."""
    if hasattr(gradient, _NOTE):
        delattr(gradient, _NOTE)


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients, from the norms of each."""
    if not norms:
        return torch.zeros(())
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to("cpu", dtype) for norm in norms]))
    return total


def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by, of at most 1."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)
