"""Layers in which an interrupt strikes, as Ctrl-C does, when the switch says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        trip.count("backward")
        return gradient


class Trip(nn.Module):
    """An identity in which an interrupt can strike."""

    def forward(self, x: Any) -> Any:
        trip.count("forward")
        return _Trip.apply(x) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Switch:
    """Raises KeyboardInterrupt the given time that an event happens."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def count(self, event: str) -> None:
        if event in self.left:
            self.left[event] -= 1
            if self.left[event] < 0:
                self.left.clear()
                raise KeyboardInterrupt(f"in a {event}")


trip = _Switch()
