"""A step of one micro-batch on one stage is the step of the bare module, and fails as a step of several cells does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipe import NoChunk, Pipe

WIDTH = 4


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), 7


LOSSES: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    "mean": (nn.MSELoss(), F.mse_loss),
    "sum": (nn.MSELoss(reduction="sum"), lambda y, t: (y - t).square().sum()),
    "sum and count": (counted, lambda y, t: (y - t).square().sum() / 7),
    "one element": (lambda y, t: F.mse_loss(y, t).view(1, 1), F.mse_loss),
}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_of_one_cell_is_that_of_the_bare_module(loss: str, schedule: str, mode: str) -> None:
    loss_fn, plain = LOSSES[loss]
    bare = layers()
    model = Pipe(copy.deepcopy(bare), [len(bare)], ["cpu"], checkpoint=mode)
    source = nn.Linear(WIDTH, WIDTH)
    for _ in range(2):  # the second adds to the gradients of the first
        x, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
        source.zero_grad()
        torch.manual_seed(1)
        expected = plain(bare(source(x)), target)
        expected.backward()
        inputs = [p.grad for p in source.parameters()]
        source.zero_grad()
        torch.manual_seed(1)
        entering = source(x)
        with torch.no_grad(), model.recording() as trace:
            returned = model.train_step(entering, NoChunk(target), loss_fn, schedule=schedule)
        assert [str(action) for action in trace] == ["F0.0", "B0.0"]
        assert torch.equal(returned, expected)
        assert not returned.requires_grad
        assert all(map(torch.equal, inputs, [p.grad for p in source.parameters()]))
    for name, p in bare.named_parameters():
        assert torch.equal(p.grad, model.get_parameter(name).grad), name
    assert all(map(torch.equal, bare.buffers(), model.buffers()))
