"""The layers of a plain ``nn.Sequential``, and what is known about how chunks go through them.

What one chunk's first forward shows (bytes that graphs keep, operations that a recomputation may leave out, whether
chunks may run together) holds for all chunks of its kind, in this step and in later ones, as long as no layer changes
between training and evaluation, and no parameter is frozen or thawed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradcache import grouping
from gradcache.tables import tables_of
from pipe.recompute.dead_code import DeadCode
from pipe.recompute.module_state import WatchedModule

__all__ = ["Layers", "Profile"]


@dataclass(frozen=True)
class Profile:
    """What the first chunk taught about all chunks of its kind; bytes are those of that chunk."""

    rows: int
    together: int
    """Chunks that may run at a time: whose layers keep no more than the whole model does for one chunk."""
    layer_bytes: int
    """What the largest layer's graph keeps, besides what entered it."""
    entering_bytes: tuple[int, ...]
    """What enters each layer, where it is to be kept."""
    graph_bytes: tuple[int, ...]
    """What each layer's lean graph keeps, with what entered it."""
    dead_code: list[DeadCode | None]
    """What each layer's recomputation may leave out; None also where another chunk's turned out to differ."""

    def scaled(self, nbytes: int, rows: int) -> int:
        """As many bytes of ``rows`` rows as ``nbytes`` are of the first chunk."""
        return -(-nbytes * rows // max(self.rows, 1))


class Layers:
    """Layers that run one after the other, and a profile for each kind of chunk.

    Args:
        model: the layers.
        boundary_bytes: bytes that may be kept between the passes of one step.
        regroup: whether chunks may run together.
    """

    def __init__(self, model: nn.Sequential, boundary_bytes: int, regroup: bool = True) -> None:
        self.layers: list[nn.Module] = list(model)
        self.boundary_bytes = boundary_bytes
        self.regroup = regroup
        self.parameters = list(model.parameters())
        self.watched = [WatchedModule(layer) for layer in self.layers]
        self.tables = [tables_of(layer) for layer in self.layers]
        self.writes_input: list[bool | None] = [None] * len(self.layers)
        self._profiles: dict[str, Profile] = {}
        self._may_group: dict[tuple[bool, ...], bool] = {}

    def call(self, j: int, value: Any) -> Any:
        """Layer ``j`` on what enters it: (args, kwargs) for the first, one value for every other."""
        if j == 0:
            args, kwargs = value
            return self.layers[0](*args, **kwargs)
        return self.layers[j](value)

    def profile_of(self, chunk: Any) -> Profile | None:
        """What is known about chunks of this kind, in the modes that the layers are in."""
        return self._profiles.get(self._key(chunk))

    def learn(
        self,
        chunk: Any,
        saved: Sequence[tuple[int, int]],
        entering_bytes: Sequence[int],
        dead_code: Sequence[DeadCode | None],
        pair: Sequence[Any],
    ) -> None:
        """Notes the profile of a chunk that just ran.

        Args:
            chunk: what entered the first layer.
            saved: what each layer's graph keeps, without and with what entered it.
            entering_bytes: what enters each layer, where it is to be kept.
            dead_code: see :class:`Profile`.
            pair: two further chunks for a trial, if chunks may run together at all.
        """
        together = 1
        alone = [nbytes for nbytes, _ in saved]
        if self.regroup and grouping.runs_of_like_chunks(pair, 2) == [[0, 1]]:
            modes = self._modes()
            if modes not in self._may_group:
                self._may_group[modes] = grouping.can_group(self.call, self.layers, *pair)
            if self._may_group[modes]:
                together = max(sum(alone) // max(*alone, 1), 1)
        self._profiles[self._key(chunk)] = Profile(
            rows=grouping.rows_in(chunk),
            together=together,
            layer_bytes=max(*alone, 1),
            entering_bytes=tuple(entering_bytes),
            graph_bytes=tuple(nbytes for _, nbytes in saved),
            dead_code=list(dead_code),
        )

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for watched in self.watched for _, module in watched.modules)

    def _key(self, chunk: Any) -> str:
        return repr((grouping.kind_of(chunk), self._modes(), [p.requires_grad for p in self.parameters]))
