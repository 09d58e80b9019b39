"""Computes, before any forward, which stage stashes and which stage pops each skip tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pipe.skip.namespace import Key
from pipe.skip.skippable import Skippable

__all__ = ["Route", "skip_routes"]


@dataclass(frozen=True)
class Route:
    """The stages that stash and pop one skip tensor, or that pass the value on (without a key)."""

    key: Key | None
    stashed_at: int
    popped_at: int


def skip_routes(partitions: Sequence[nn.Sequential]) -> list[Route]:
    """The routes between different stages, whose skippable layers passed :func:`pipe.skip.verify_skippables`."""
    stashed: dict[Key, int] = {}
    routes: list[Route] = []
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            if isinstance(layer, Skippable):
                for key in layer.poppable():
                    begin = stashed.pop(key)
                    if begin != j:
                        routes.append(Route(key, begin, j))
                stashed.update((key, j) for key in layer.stashable())
    return routes
