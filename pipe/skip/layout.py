"""Computes, before any forward, which stage stashes and which stage pops each skip tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pipe.skip.namespace import Key
from pipe.skip.skippable import Skippable

__all__ = ["Route", "SkipLayout", "inspect_skip_layout"]


@dataclass(frozen=True)
class Route:
    """The stages that stash and pop one skip tensor."""

    key: Key
    stashed_at: int
    popped_at: int


@dataclass(frozen=True)
class SkipLayout:
    """All routes between different stages."""

    routes: tuple[Route, ...]

    def arriving(self, stage: int) -> list[Route]:
        """Routes that end at ``stage``, sorted by the stage where they begin."""
        return sorted((r for r in self.routes if r.popped_at == stage), key=lambda r: r.stashed_at)

    def leaving(self, stage: int) -> list[Route]:
        """Routes that begin at ``stage``."""
        return [route for route in self.routes if route.stashed_at == stage]


def inspect_skip_layout(partitions: Sequence[nn.Sequential]) -> SkipLayout:
    """The layout of stages whose skippable layers passed :func:`pipe.skip.verify_skippables`."""
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
    return SkipLayout(tuple(routes))
