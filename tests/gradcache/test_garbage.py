"""What a step leaves behind: nothing that waits for the garbage collector and holds memory meanwhile."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # layers import it when they first run, which leaves garbage of its own
from torch import nn

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from offload import MemoryPolicy, OffloadModel


class Block(nn.Module):
    """Ends in operations that save nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(torch.relu(self.norm(x)))


def in_memory(layers: list[nn.Module], home: Path) -> nn.Module:
    return nn.Sequential(*layers)


def offloaded(layers: list[nn.Module], home: Path) -> nn.Module:
    return OffloadModel(
        layers,
        "cpu",
        home,
        checkpoint_activation=True,
        num_slices=3,
        memory=MemoryPolicy.fixed(activation_bytes=1 << 20, graph_bytes=1 << 20),
    )


def wrapped(layers: list[nn.Module], home: Path) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), offloaded(layers, home), nn.LayerNorm(8))


@pytest.mark.parametrize("make", [in_memory, offloaded, wrapped])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["first step", "second step"])
def test_a_step_leaves_no_tensor_and_nothing_of_ours_to_the_garbage_collector(
    make: Any, steps_before: int, tmp_path: Path
) -> None:
    model = make([Block() for _ in range(3)], tmp_path)
    step = GradCache([model, model], 2, SimpleContrastiveLoss())
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    for _ in range(steps_before):
        step(x, y)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step(x, y)
        gc.collect()
        ours = ("gradcache", "offload", "pipe")
        left = [
            thing
            for thing in gc.garbage
            if isinstance(thing, torch.Tensor | torch.UntypedStorage) or type(thing).__module__.split(".")[0] in ours
        ]
        assert not left, [type(thing) for thing in left]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
