"""What all models of the fuzz are made of: one width, one size of tables, one linear layer."""

from __future__ import annotations

from torch import nn

WIDTH = 4
ROWS = 12  # of tables


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)
