"""What a step leaves in modules, and whether two have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["assert_same_step", "gradients"]


#: Relative and absolute, by type; of others, torch's.
TOLERANCES: dict[Any, Any] = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-5, 1e-6)}


def gradients(*modules: nn.Module) -> dict[str, Any]:
    """By name, of all parameters: dense, and whole where processes hold parts of them."""
    found: dict[str, Any] = {name: p.grad for name, p in nn.ModuleList(modules).named_parameters()}
    for name, gradient in found.items():
        if gradient is not None:
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.to_dense()
    return found


def assert_same_step(
    expected: Sequence[nn.Module], actual: Sequence[nn.Module], tolerance: float | None = None
) -> None:
    """Compares gradients and buffers of two lists of modules; ``tolerance``: absolute, by default by their types."""
    wanted, found = (
        gradients(*modules) | dict(nn.ModuleList(modules).named_buffers()) for modules in (expected, actual)
    )
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        relative, absolute = TOLERANCES.get(None if value is None else value.dtype, (None, None))
        if tolerance is not None:
            relative, absolute = relative or 1e-5, tolerance
        torch.testing.assert_close(value, wanted[name], rtol=relative, atol=absolute, msg=lambda m, n=name: f"{n}: {m}")
