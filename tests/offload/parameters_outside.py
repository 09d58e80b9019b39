"""Layers whose parameters are used, kept or written outside their forward: a tied head, a kept view, ``.data``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TiedHead(nn.Module):
    """Multiplies by a table that an earlier layer passed on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] @ pair[1].t()


class KeepsTransposed(torch.autograd.Function):
    """Keeps a view of the weight as an attribute of the context, past autograd's saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.transposed = weight.t()
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient @ ctx.transposed.t(), gradient.t() @ ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(KeepsTransposed.apply(x, self.weight))  # type: ignore[no-untyped-call]


class ActNorm(nn.Module):
    """Initialises itself from the first batch that it sees."""

    def __init__(self, width: int, *, assigns: bool = False) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("ready", torch.tensor(0))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            if self.assigns:
                self.shift.data = -x.detach().mean(0)
            else:
                with torch.no_grad():
                    self.shift.copy_(-x.detach().mean(0))
            self.ready.fill_(1)
        return x + self.shift
