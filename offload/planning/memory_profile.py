"""Predicts the memory of a cell's backward from the tensors that autograd saved in its forward, in order.

Backward visits them in reverse order. At an activation it allocates the activation's gradient while the gradient of the
operation after it still exists, then frees the activation; at a weight it allocates a gradient that stays. Activations
are freed while weight gradients appear, so the peak is less than their sum.

Not included: memory that operations allocate inside, and gradients that wait for another branch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.planning.rows import remember

__all__ = ["MemoryProfile", "ProfilesBySize", "SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved."""

    #: Bytes of its gradient: of a weight, and of an activation, whose gradient is passed on.
    stays: int
    flows: int
    #: Bytes that are freed after its use.
    freed: int


@dataclass(frozen=True)
class MemoryProfile:
    """The tensors that one cell of ``rows`` rows saved, in the order of backward. All but weights grow with rows."""

    rows: float
    saved_tensors: Sequence[SavedTensor]

    @cached_property
    def _freed_bytes(self) -> int:
        return sum(saved_tensor.freed for saved_tensor in self.saved_tensors)

    def kept_bytes(self, rows: float) -> int:
        """Bytes that a cell keeps until its backward begins."""
        return int(self._freed_bytes * rows // (self.rows or 1))

    def holding(self, bytes_per_row: float) -> MemoryProfile:
        """That of a cell whose graph holds so much, with what enters it, which is freed last."""
        more = SavedTensor(0, 0, max(0, int(bytes_per_row * self.rows) - self._freed_bytes))
        return MemoryProfile(self.rows, [*self.saved_tensors, more])

    def peak_bytes(self, rows: float, gradient_bytes: int, *, adds: bool = False) -> int:
        """Peak bytes of its activations, their gradients and the gradients of its weights.

        ``gradient_bytes``: of all weights; those that autograd did not save (a bias, an embedding) come last.
        ``adds``: whether they are added to those of an earlier micro-batch.
        """
        scale, kept = rows / (self.rows or 1), float(self.kept_bytes(rows))
        # Gradients of weights, which are added when all of the cell are made; and of the operation after.
        weights, following = float(gradient_bytes if adds else 0), 0.0
        peak, end = kept + weights, weights + gradient_bytes
        for saved_tensor in self.saved_tensors:
            weights += saved_tensor.stays
            peak = max(peak, kept + weights + following + saved_tensor.flows * scale)
            following = saved_tensor.flows * scale or following
            kept -= saved_tensor.freed * scale
        return int(max(peak, end + following))


class ProfilesBySize:
    """Profiles of cells of several sizes, by shard. What does not grow with rows alone is measured at each size."""

    def __init__(self) -> None:
        self._profiles: dict[int, dict[float, MemoryProfile]] = {}

    def add(self, shard: int, profile: MemoryProfile, *, continues: bool) -> None:
        """Adds the profile of a cell; ``continues``: of another step of it, whose backward comes first."""
        known = self._profiles.setdefault(shard, {})
        if continues and (before := known.get(profile.rows)) is not None:
            profile = MemoryProfile(profile.rows, [*profile.saved_tensors, *before.saved_tensors])
        remember(known, profile.rows, profile)

    def nearest(self, rows: float) -> dict[int, MemoryProfile]:
        """By shard: the profile of the size nearest to ``rows``, of two that are as near the larger one."""

        def distance(size: float) -> tuple[float, float]:
            return abs(math.log((size or 1) / (rows or 1))), -size

        return {shard: known[min(known, key=distance)] for shard, known in self._profiles.items()}
