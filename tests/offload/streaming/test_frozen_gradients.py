"""Frozen parameters take no room for gradients, whenever they were frozen."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer

WIDTH, RANK = 64, 2


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank update, which comes last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_gradients_take_the_room_of_what_trains_after_a_switch(tmp_path: Path) -> None:
    """The room shrinks and grows; what is computed in it is claimed by the loops of the fuzz that freeze and thaw."""
    layers = nn.Sequential(*(Adapted() for _ in range(4)))
    model = OffloadModel(layers, "cpu", f"{tmp_path}/", num_slices=4, checkpoint_activation=True)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, lr=0.01)
    for thawed in [False, True, False]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(thawed or "base" not in name)
        model(torch.randn(6, WIDTH)).pow(2).mean().backward()
        if not thawed:
            sizes = {p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None}
            assert sizes == {2 * WIDTH * RANK * 4}
        optimizer.step()
        optimizer.zero_grad()
