"""Turns: stages that share a device without fitting on it together.

A stage that stands still needs room for its weights all the time, so there must be a device for each. A module that can
be loaded when it is used needs room only for its turn; then a pipe can have more stages than devices, dealt to them in
rounds (stage ``j`` to device ``j % d``), and a device needs room for one stage and for what is on its way for the next.
Each entry of ``devices`` is such a place. A stage that was given an entry of its own has that place for itself.

The pipe knows the order of turns and who shares a device; the module knows how it is loaded. :class:`TakesTurns` is all
that one must know of the other: this package loads nothing, and whatever has these methods can be a stage.

Invariant: between two modules of one place the pipe changes as rarely as its schedule allows (see
:func:`pipe.schedule.fill_drain`), forward and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from pipe.stream import normalize_device

__all__ = ["TakesTurns", "held_still", "share_places", "takers_in", "takes_turns"]


@runtime_checkable
class TakesTurns(Protocol):
    """A module whose weights are on its device only when it is used."""

    @property
    def device(self) -> torch.device:
        """Where it computes. It is there for good: the pipe does not move it."""
        ...

    def take_turns(self, stages: Sequence[Sequence[TakesTurns]]) -> None:
        """Told to the first module of a place: for each stage there, in order, the modules that it runs.

        No two stages compute at the same time, so their weights may use the same memory.
        """
        ...

    def held_still(self) -> contextlib.AbstractContextManager[None]:
        """Inside, nobody changes weights: what one call loaded may serve the next."""
        ...

    def expect(self, *, backward: bool = False) -> None:
        """Its turn is the next one at its place: it may begin to load into memory that nobody needs meanwhile."""
        ...


def takers_in(layers: Iterable[nn.Module]) -> list[TakesTurns]:
    """The modules that take turns, among layers and what is inside them."""
    found: dict[int, TakesTurns] = {}
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, TakesTurns):
                found.setdefault(id(module), module)
    return list(found.values())


def takes_turns(layers: Iterable[nn.Module]) -> bool:
    """Whether layers need room for weights only while they run: all their parameters are of modules that take turns."""
    layers = list(layers)
    takers = takers_in(layers)
    theirs = {id(p) for taker in takers if isinstance(taker, nn.Module) for p in taker.parameters()}
    return bool(takers) and all(id(p) in theirs for layer in layers for p in layer.parameters())


def share_places(
    stages: Sequence[Iterable[nn.Module]], devices: Sequence[torch.device], places: Sequence[Hashable]
) -> None:
    """Tells modules that take turns with whom they do: those of one place.

    Raises:
        ValueError: if one computes on another device than its stage.
    """
    shared: dict[Hashable, list[list[TakesTurns]]] = {}
    for j, (stage, device, place) in enumerate(zip(stages, devices, places, strict=True)):
        takers = takers_in(stage)
        for taker in takers:
            if normalize_device(taker.device) != device:
                raise ValueError(
                    f"expected stage {j} on {device}, got one that computes on {taker.device}; make it for the device "
                    f"that the pipe deals to it: stage j gets devices[j % len(devices)]"
                )
        if takers:
            shared.setdefault(place, []).append(takers)
    for groups in shared.values():
        groups[0][0].take_turns(groups)


@contextlib.contextmanager
def held_still(takers: Iterable[TakesTurns]) -> Iterator[None]:
    """Inside, the weights of all these modules stay as they are."""
    with contextlib.ExitStack() as stack:
        for taker in takers:
            stack.enter_context(taker.held_still())
        yield
