"""What a training step has in memory at its fullest moment.

Not everything that a step holds is there at once. Boundaries go while gradients come; the graphs that were kept go one
by one; and inside a cell activations go while gradients of weights come (:mod:`offload.planning.memory_profile`). So
the peak is looked for, shard by shard, in backward: forward holds at its end what backward begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from offload.planning.memory_profile import MemoryProfile

__all__ = ["PeakMemory"]


@dataclass(frozen=True)
class PeakMemory:
    """What a step brings into the memory that layers compute in."""

    #: Slots, and homes of weights where they are in the same memory.
    fixed_bytes: int
    #: Rows of each micro-batch.
    rows: Sequence[int]
    #: Of each shard, as they are at home.
    gradient_bytes: Sequence[int]
    #: Whether gradients that are complete stay in this memory, where homes are.
    gradients_stay: bool
    #: Shard -> in how many of the next shard's backward cells its gradients are still on their way; 0 if not named.
    in_flight: Mapping[int, int]
    #: Shard -> bytes of one row of the boundary that enters it; the number of shards -> of the output.
    boundary_bytes_per_row: Mapping[int, float]
    #: The most that boundaries take here, and as much again their gradients.
    most_boundary_bytes: float
    #: Shard -> what a cell of it keeps and allocates; of those that take part in backward.
    memory_profiles: Mapping[int, MemoryProfile]
    #: Shards whose cells keep their graphs from forward to backward.
    keeping: Set[int]

    def peak_bytes(self) -> int:
        """At the fullest moment."""
        middle = {0, min(1, len(self.rows) - 1), len(self.rows) - 1}
        return max((self._bytes_at(j, i) for j in self.memory_profiles for i in middle), default=self.fixed_bytes)

    def activation_bytes(self) -> int:
        """The most that layers keep and allocate, without gradients of weights."""
        return max(
            (self._kept(j, 0) + self.memory_profiles[j].peak_bytes(max(self.rows), 0) for j in self.memory_profiles),
            default=0,
        )

    def _bytes_at(self, j: int, i: int) -> int:
        """While backward is in cell ``i`` of shard ``j``."""
        memory_profile, after = self.memory_profiles[j], j + 1
        held = self.fixed_bytes + self._kept(j, i)
        held += memory_profile.peak_bytes(self.rows[i], self.gradient_bytes[j], adds=i > 0)
        if self.gradients_stay:
            held += sum(self.gradient_bytes[after:])
        elif i < self.in_flight.get(after, 0):
            held += self.gradient_bytes[after]
        here, all_rows = sum(self.rows[i:]), sum(self.rows)
        resting = sum(self._boundary(k, all_rows) for k in range(1, j)) + self._boundary(j, here)
        # Of what enters the next shard those that were not used yet, of what enters this one those that came.
        gradients = self._level(j, all_rows - here + self.rows[i])
        if after < len(self.gradient_bytes):
            gradients += self._level(after, here)
        held += int(min(resting, self.most_boundary_bytes) + min(gradients, self.most_boundary_bytes))
        # The user has the output, and autograd its gradient, until backward is over.
        return held + 2 * int(self._level(len(self.gradient_bytes), all_rows))

    def _kept(self, j: int, i: int) -> int:
        """Graphs of cells that backward has not come to."""
        kept = sum(
            self.memory_profiles[k].kept_bytes(sum(self.rows))
            for k in self.keeping
            if k < j and k in self.memory_profiles
        )
        return kept + (self.memory_profiles[j].kept_bytes(sum(self.rows[i + 1 :])) if j in self.keeping else 0)

    def _boundary(self, j: int, rows: int) -> float:
        return 0.0 if j in self.keeping else self._level(j, rows)

    def _level(self, j: int, rows: int) -> float:
        return self.boundary_bytes_per_row.get(j, 0.0) * rows
