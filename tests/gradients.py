"""What a step leaves in modules, and whether two have the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["assert_same_step", "gradients"]


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
    """Gradients and buffers of two lists of modules; within torch's tolerances or, in absolute terms, another one."""
    given = {} if tolerance is None else {"rtol": 1e-5, "atol": tolerance}
    of_both = [gradients(*modules) | dict(nn.ModuleList(modules).named_buffers()) for modules in (actual, expected)]
    torch.testing.assert_close(*of_both, **given)
