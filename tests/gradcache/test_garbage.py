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
from offload import MemoryPolicy
from tests.gradcache.towers import Calls, offloaded


def in_memory(layers: list[nn.Module], home: Path) -> nn.Module:
    return nn.Sequential(*layers)


def streamed(layers: list[nn.Module], home: Path) -> nn.Module:
    memory = MemoryPolicy.fixed(activation_bytes=1 << 20, graph_bytes=1 << 20)
    return offloaded(nn.Sequential(*layers), home, memory=memory)


def wrapped(layers: list[nn.Module], home: Path) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), streamed(layers, home), nn.LayerNorm(8))


@pytest.mark.parametrize("make", [in_memory, streamed, wrapped])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["first step", "second step"])
def test_a_step_leaves_no_tensor_and_nothing_of_ours_as_garbage(make: Any, steps_before: int, tmp_path: Path) -> None:
    inner = [nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
    # Each ends in an operation that saves nothing.
    model = make([Calls(lambda self, x: x + self.members[0](x), each) for each in inner], tmp_path)
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
