"""What a step used is free when the step is over: not when garbage is collected next, and not never."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel


class SavesItsOutput(nn.Module):
    """``exp`` saves its own result for backward; ``seen`` remembers it without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = (-x.square()).exp()
        self.seen.append(weakref.ref(y))
        return y


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.collect()


def step(model: OffloadModel) -> None:
    model.zero_grad()
    model(torch.ones(4, 256)).sum().backward()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["keep", "checkpoint"])
def test_a_step_leaves_no_tensor_to_the_garbage_collector(home: str, checkpoint: bool) -> None:
    """A layer of half a MiB is moved directly, in pieces, which once held the gradients of a whole model.

    A tensor that a saved-tensor hook hands back as it came holds its own graph: no collector sees that cycle.
    """
    watched = SavesItsOutput()
    layers = nn.Sequential(nn.Linear(256, 256), watched, nn.Linear(256, 256), nn.Linear(256, 512))
    model = OffloadModel(layers, "cpu", home, 3, checkpoint_activation=checkpoint)
    step(model)  # what is made once may be found by the collector
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    step(model)
    gc.collect()
    assert [tuple(found.shape) for found in gc.garbage if isinstance(found, Tensor)] == []
    assert watched.seen
    assert [seen for seen in watched.seen if seen() is not None] == []
