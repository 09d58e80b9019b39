"""One step of training with clipping, as plain PyTorch code takes it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def clipped_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any, Tensor], Tensor],
    clip: Callable[[], object],
) -> Callable[[Any, Tensor], float]:
    """A function of input and target to the loss. ``clip`` is called between backward and the optimizer's step."""

    def step(value: Any, target: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(model(value), target)
        loss.backward()
        clip()
        optimizer.step()
        return loss.item()

    return step
