"""A model whose home is kept, and what tests do with it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from offload import DiskHome, OffloadModel
from tests.offload import side_by_side
from tests.offload.side_by_side import drawn

WIDTH = 12


class Counting(nn.Module):
    """A parameter of its own, a buffer that is in no state_dict, and no way to initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.complex64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1j
        return x * self.scale


def layers(device: str = "cpu", *, width: int = WIDTH, tied: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.Linear(width, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH)
        )
    if tied:
        model[4].weight = model[0].weight if width == WIDTH else model[4].weight
    return model


def offloaded(model: nn.Module, folder: Path, *, slices: int = 3, **choices: bool) -> OffloadModel:
    home = DiskHome(folder, keep=True, **choices)  # type: ignore[arg-type]
    return OffloadModel(model, "cpu", home, num_slices=slices, checkpoint_activation=True)


def train(model: nn.Module, steps: range) -> list[float]:
    batches = [drawn(k, 6, WIDTH) for k in steps]
    return side_by_side.train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
