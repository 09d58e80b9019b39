"""What one shard does with one micro-batch: arithmetic, bytes that its operations touch, and what autograd saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.memory_profile import SavedTensor

__all__ = ["Work", "joined"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one cell. A multiply-add counts two."""

    output_bytes: int
    #: Of matrix products.
    forward_flops: float
    backward_flops: float
    #: Read and written by all other operations.
    forward_bytes: float
    backward_bytes: float
    #: Tensors saved for a backward, in its order, without the input of the cell.
    saved: Sequence[SavedTensor]
    #: The same of a graph that is kept, with the input.
    kept: Sequence[SavedTensor]


def joined(works: Sequence[Work]) -> Work:
    """The work of consecutive layers."""
    return Work(
        output_bytes=works[-1].output_bytes,
        forward_flops=sum(work.forward_flops for work in works),
        backward_flops=sum(work.backward_flops for work in works),
        forward_bytes=sum(work.forward_bytes for work in works),
        backward_bytes=sum(work.backward_bytes for work in works),
        saved=[saved for work in reversed(works) for saved in work.saved],
        kept=[saved for work in reversed(works) for saved in work.kept],
    )
