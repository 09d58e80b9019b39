"""A pipeline stage: consecutive layers on one device, as a function with skip tensors as explicit inputs and outputs.

Besides the value that is passed from stage to stage, a stage receives skip tensors of earlier stages and returns skip
tensors for later ones. As explicit arguments and results they are ordinary tensors to autograd, to checkpointing and
to copies.

Invariant: a stage does not write into its input, which belongs to the stage before or to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import map_tensors
from pipe.skip.layout import Route
from pipe.skip.namespace import Key
from pipe.skip.tracker import SkipTracker, exchange_tracker
from pipe.turn import takers_in

__all__ = ["Stage", "writes_input"]


def writes_input(layers: nn.Module) -> bool:
    """Whether an in-place layer such as ``nn.ReLU(inplace=True)`` may write into the input itself.

    Layers without parameters may return their input unchanged; a layer with parameters returns a new tensor.
    """
    waiting: list[nn.Module | None] = [layers]
    while waiting:
        layer = waiting.pop()
        if layer is None:
            continue
        if layer.__dict__.get("inplace", getattr(type(layer), "inplace", False)):
            return True
        if layer._parameters and any(parameter is not None for parameter in layer._parameters.values()):
            return False
        waiting += reversed(layer._modules.values())
    return False


class Stage:
    """Layers on a device: stage number ``index`` of a pipe with the skip connections ``routes``."""

    def __init__(self, layers: nn.Sequential, device: torch.device, index: int, routes: Sequence[Route]) -> None:
        self.layers = layers
        #: The layers as they were wrapped.
        self.wrapped = [(name, layer) for name, layer in layers._modules.items() if layer is not None]
        self.device = device
        self.index = index
        self.arriving = sorted((r for r in routes if r.popped_at == index), key=lambda r: r.stashed_at)
        self.leaving = [r for r in routes if r.stashed_at == index]
        self._entering: tuple[Key, ...] = tuple(route.key for route in self.arriving)
        self._copies_input = writes_input(layers)
        self._takers = takers_in(layers)

    def follow(self) -> None:
        """Checks again whether the layers write in place. To be called before each mini-batch."""
        self._copies_input = writes_input(self.layers)

    @property
    def takes_turns(self) -> bool:
        """Whether any module of the stage takes turns."""
        return bool(self._takers)

    def prefetch(self, *, backward: bool = False) -> None:
        """Calls ``prefetch`` of the modules that take turns: the next turn on the device is that of this stage."""
        for taker in self._takers:
            taker.prefetch(backward=backward)

    def __call__(self, input: tuple[Any, Sequence[Any]]) -> tuple[Any, list[Any]]:
        """Runs the layers on a value and the skip tensors of ``arriving``; returns a value and those of ``leaving``."""
        value, popped = input
        if self._copies_input:
            # An in-place operation on a micro-batch would write into the storage of the mini-batch, and on a saved
            # boundary it would change the input of the recomputation.
            value = map_tensors(Tensor.clone, value)
        tracker = SkipTracker(zip(self._entering, popped, strict=True))
        before = exchange_tracker(tracker)
        try:
            value = self.layers(value)
        finally:
            exchange_tracker(before)
        return value, [tracker.load(route.key) for route in self.leaving]
