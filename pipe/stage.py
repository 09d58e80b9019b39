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
from pipe.skip.skippable import Skippable
from pipe.skip.tracker import SkipTracker, use_skip_tracker
from pipe.turn import takers_in

__all__ = ["Stage", "Values", "writes_input"]

Values = dict[Key | None, Any]
"""The value (under None) and the skip tensors of a micro-batch that are on their way to a later stage."""


def writes_input(layers: nn.Module) -> bool:
    """Whether an in-place layer such as ``nn.ReLU(inplace=True)`` may write into the input itself.

    Layers without parameters may return their input unchanged; a layer with parameters returns a new tensor.
    """
    for layer in layers.modules():
        if layer.__dict__.get("inplace", getattr(type(layer), "inplace", False)):
            return True
        if layer._parameters and any(parameter is not None for parameter in layer._parameters.values()):
            return False
    return False


class Stage:
    """Layers on a device: stage number ``index`` of ``count``, with the skip connections ``routes``.

    Its first input and output is the value that is passed from stage to stage; the others are skip tensors.
    """

    def __init__(
        self, layers: nn.Sequential, device: torch.device, index: int, count: int, routes: Sequence[Route]
    ) -> None:
        self.layers = layers
        self.device = device
        popped = sorted((r for r in routes if r.popped_at == index), key=lambda r: r.stashed_at)
        stashed = [r for r in routes if r.stashed_at == index]
        self.arriving = [Route(None, max(index - 1, 0), index), *popped]
        self.leaving = [Route(None, index, min(index + 1, count - 1)), *stashed]
        self._popped, self._stashed = [route.key for route in popped], [route.key for route in stashed]
        self._skips = any(isinstance(layer, Skippable) for layer in layers.modules())
        self._takers = takers_in(layers)
        self.follow()

    def follow(self) -> None:
        """Checks whether the layers write in place. To be called before each mini-batch."""
        self._copies_input = writes_input(self.layers)

    def prefetch(self, *, backward: bool = False) -> None:
        """Calls ``prefetch`` of the modules that take turns: the next turn on the device is that of this stage."""
        for taker in self._takers:
            taker.prefetch(backward=backward)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Runs the layers on what arrives, in the order of ``arriving``; returns what leaves."""
        value, *popped = inputs
        if self._copies_input:
            # An in-place operation on a micro-batch would write into the storage of the mini-batch, and on a saved
            # boundary it would change the input of the recomputation.
            value = map_tensors(Tensor.clone, value)
        if not self._skips:
            return [self.layers(value)]
        tracker: SkipTracker = dict(zip(self._popped, popped, strict=True))
        with use_skip_tracker(tracker):
            value = self.layers(value)
        return [value, *map(tracker.pop, self._stashed)]
