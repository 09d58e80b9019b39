"""What models of the fuzz are made of: one width, one size of tables, one linear layer, and one in which an interrupt
strikes, as Ctrl-C does, when the switch says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

WIDTH = 4
ROWS = 12  # of tables


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Trip(nn.Module):
    """An identity in which an interrupt can strike."""

    def forward(self, x: Any) -> Any:
        trip.count("forward")
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda _: trip.count("backward"))
        return y


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
