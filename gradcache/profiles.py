"""What one chunk's forward through some layers shows about all chunks of its kind, and what follows for a step.

Bytes that graphs keep, operations that a recomputation may leave out, and whether chunks may run together: this holds
in later steps as well, as long as no layer changes between training and evaluation, and no parameter is frozen or
thawed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradcache.trial import treats_rows_apart
from offload.engine.regroup import rows_in, runs_alike
from offload.engine.resident import ResidentRunner, Survey
from pipe.nested import flatten
from pipe.recompute.dead_code import DeadCode

__all__ = ["Profile", "Profiles"]


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
    dead_code: tuple[DeadCode | None, ...]
    """What each layer's recomputation may leave out."""

    def graph_bytes_of(self, j: int, rows: int) -> int:
        """What layer ``j``'s graph keeps of so many rows."""
        return -(-self.graph_bytes[j] * rows // max(self.rows, 1))

    def chunks_together(self, chunks: int, budget: int | None) -> int:
        """How many of ``chunks`` run at a time: more than one only in room that what all of them keep leaves."""
        if budget is None:
            return self.together
        room = max(budget - chunks * sum(self.entering_bytes), 0)
        return min(self.together, 1 + room // self.layer_bytes)

    def graphs_from(self, runs: Sequence[int], first: int, budget: int) -> list[int]:
        """For each run of so many chunks the layer from which on graphs are kept.

        Backward begins with these cells, so kept graphs are gone when it recomputes anything.
        """
        layers = len(self.graph_bytes)
        plan = [layers] * len(runs)
        left = budget - sum(runs) * sum(self.entering_bytes)
        for j in range(layers - 1, first - 1, -1):
            for k, chunks in enumerate(runs):
                left -= chunks * (self.graph_bytes[j] - self.entering_bytes[j])
                if left < 0:
                    return plan
                plan[k] = j
        return plan


class Profiles:
    """The profiles of the layers of one model, by kinds of chunks.

    Args:
        replayables: of the layers.
        regroup: whether chunks may run together.
    """

    def __init__(self, replayables: Sequence[ResidentRunner], regroup: bool) -> None:
        self._runners = replayables
        self._modules = [module for replayable in replayables for _, module in replayable.watched.modules]
        self._parameters = [parameter for replayable in replayables for parameter in replayable.shard.parameters]
        self._regroup = regroup
        self._known: dict[str, Profile] = {}
        self._apart: dict[tuple[bool, ...], bool] = {}

    def of(self, chunk: Any) -> Profile | None:
        """What is known about chunks of this kind, in the modes that the layers are in."""
        return self._known.get(self._key(chunk))

    def learn(
        self,
        chunk: Any,
        surveys: Sequence[Survey],
        entering_bytes: Sequence[int],
        further: Callable[[], Sequence[Any]],
    ) -> None:
        """Notes the profile of a chunk that just ran.

        Args:
            chunk: what entered the first layer.
            surveys: of the layers.
            entering_bytes: what enters each layer, where it is to be kept.
            further: gives two further chunks for a trial, if it is asked.
        """
        alone = [survey.activation_bytes for survey in surveys]
        together = max(sum(alone) // max(*alone, 1), 1) if self._may_join(surveys, further) else 1
        self._known[self._key(chunk)] = Profile(
            rows=rows_in(chunk) or 0,
            together=together,
            layer_bytes=max(*alone, 1),
            entering_bytes=tuple(entering_bytes),
            graph_bytes=tuple(survey.graph_bytes for survey in surveys),
            dead_code=tuple(survey.dead_code for survey in surveys),
        )

    def _may_join(self, surveys: Sequence[Survey], further: Callable[[], Sequence[Any]]) -> bool:
        if not self._regroup or any(survey.moves_buffers for survey in surveys):
            return False
        pair = further()
        if runs_alike(pair, sum(rows_in(chunk) or 0 for chunk in pair)) != [[0, 1]]:
            return False
        modes = self._modes()
        if modes not in self._apart:
            calls = [replayable.call(None) for replayable in self._runners]
            self._apart[modes] = treats_rows_apart(calls, self._modules, pair)
        return self._apart[modes]

    def _modes(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._modules])

    def _key(self, chunk: Any) -> str:
        leaves, spec = flatten(chunk)
        kind = [_kind_of(leaf) for leaf in leaves]
        return repr((spec, kind, rows_in(chunk) is None, self._modes(), [p.requires_grad for p in self._parameters]))


def _kind_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, leaf.device, leaf.dim(), leaf.shape[1:], leaf.requires_grad
