"""The protocol by which several offloaded stages share the memory of one device, one stage at a time.

A resident stage needs device memory for its weights all the time, so each needs a device of its own. A module that
loads its weights when it is used needs memory only during its turn. With such modules a pipe can have more stages than
devices, assigned round-robin (stage ``j`` to device ``j % d``); a device then needs memory for the weights of one stage
and for those being prefetched for the next. Each entry of ``devices`` is a place where stages take turns. A stage with
an entry of its own has that place to itself.

The pipe knows the order of turns and which stages share a device; the module knows how to load its weights. Any module
with the methods of :class:`TakesTurns` can be such a stage.

Invariant: such a pipe changes from one stage to another as rarely as possible: stage after stage, each runs all
micro-batches forward, and in reverse all of them backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from pipe.stream import normalize_device

__all__ = ["TakesTurns", "frozen_weights", "share_places", "takers_in", "takes_turns"]


@runtime_checkable
class TakesTurns(Protocol):
    """A module whose weights are on its device only when it is used."""

    @property
    def device(self) -> torch.device:
        """The device that it computes on. It is fixed: the pipe does not move the module."""
        ...

    def share_slots(self, stages: Sequence[Sequence[TakesTurns]]) -> None:
        """Shares the memory for weights. Called on the first module of a place.

        No two of these stages compute at the same time, so their weights may use the same memory.

        Args:
            stages: for each stage of the place, in order, the modules that it runs.
        """
        ...

    def frozen_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which weights do not change, so that weights loaded by one call may be reused by the next."""
        ...

    def prefetch(self, *, backward: bool = False) -> None:
        """Announces that the module has the next turn at its place, so that it may prefetch into unused memory."""
        ...


def takers_in(layers: Iterable[nn.Module]) -> list[TakesTurns]:
    """The modules that take turns, among ``layers`` and their submodules."""
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    return [module for module in modules if isinstance(module, TakesTurns)]


def takes_turns(layers: Iterable[nn.Module]) -> bool:
    """Whether layers need memory for weights only while they run: all parameters are in modules that take turns."""
    layers = list(layers)
    takers = takers_in(layers)
    theirs = {id(p) for taker in takers if isinstance(taker, nn.Module) for p in taker.parameters()}
    return bool(takers) and all(id(p) in theirs for layer in layers for p in layer.parameters())


def share_places(stages: Sequence[Iterable[nn.Module]], devices: Sequence[torch.device], places: int) -> None:
    """Calls ``share_slots`` for each of the ``places``, with the modules of all its stages."""
    takers = [takers_in(stage) for stage in stages]
    for j, (theirs, device) in enumerate(zip(takers, devices, strict=True)):
        for taker in theirs:
            if normalize_device(taker.device) != device:
                raise ValueError(
                    f"expected stage {j} on {device}, got one that computes on {taker.device}; make it for the device "
                    f"that the pipe assigns to it: stage j gets devices[j % len(devices)]"
                )
    for place in range(places):
        groups = [theirs for theirs in takers[place::places] if theirs]
        if groups:
            groups[0][0].share_slots(groups)


@contextlib.contextmanager
def frozen_weights(takers: Iterable[TakesTurns]) -> Iterator[None]:
    """A context in which the weights of all these modules do not change."""
    with contextlib.ExitStack() as stack:
        for taker in takers:
            stack.enter_context(taker.frozen_weights())
        yield
