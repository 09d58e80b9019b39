"""The course of a cell's memory in backward, read off what autograd saved of it in forward, in order.

Backward goes through the same tensors the other way round. At each activation its gradient comes into being while the
gradient that came from behind is still there, and the activation is free afterwards; at each weight a gradient comes
that stays. So activations are at their most when there is no gradient of a weight yet, and all of those are there when
the last activation has gone: to add up both would be to count what is never there at once.

What cannot be seen from outside is left out: what operations allocate inside, and gradients that wait for another
branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MemoryProfile", "SavedTensor"]


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saved, as backward comes to it."""

    #: Bytes of its gradient: one that stays, and one that goes on to what was before.
    stays: int
    flows: int
    #: Bytes that are free afterwards.
    freed: int


@dataclass(frozen=True)
class MemoryProfile:
    """What one cell of ``rows`` rows saved, in the order of backward. Weights do not grow with rows, the rest does."""

    rows: int
    saved_tensors: Sequence[SavedTensor]

    def kept_bytes(self, rows: int) -> int:
        """Bytes that are kept of a cell when its backward begins."""
        return sum(saved_tensor.freed for saved_tensor in self.saved_tensors) * rows // max(self.rows, 1)

    def peak_bytes(self, rows: int, gradient_bytes: int, *, adds: bool = False) -> int:
        """The most that its activations, their gradients and those of its weights take at once.

        Args:
            rows: of the cell.
            gradient_bytes: of all weights. Those that autograd did not save (a bias, an embedding) come last.
            adds: whether the gradients of another micro-batch are there already, to which these are added.
        """
        scale = rows / max(self.rows, 1)
        kept = float(self.kept_bytes(rows))
        come, coming, behind = 0.0, 0.0, 0.0
        peak = kept
        for saved_tensor in self.saved_tensors:
            # What is to be added lives until the gradient that goes on, which the same operation makes, is there too.
            coming = saved_tensor.stays or (coming if adds else 0.0)
            peak = max(peak, kept + come + coming + behind + saved_tensor.flows * scale)
            if not adds:
                come += saved_tensor.stays
            elif saved_tensor.flows:
                coming = 0.0
            behind = saved_tensor.flows * scale or behind
            kept -= saved_tensor.freed * scale
        if adds:
            return int(peak) + gradient_bytes
        return int(max(peak, gradient_bytes + behind))
