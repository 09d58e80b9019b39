"""Counters of a train pipeline: batches, steps, wait times, and the reasons where stages do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Statistics"]


@dataclass(frozen=True)
class Statistics:
    """Counted since construction.

    Attributes:
        batches: batches that were run.
        steps: optimizer steps.
        wait_seconds: for each stage, how long the caller's thread was blocked waiting for it, in seconds.
        pageable_bytes: host bytes whose copy could not overlap with compute because their memory was not pinned.
        undistributed: for each module whose input distribution could not start before its forward, the reason.
        batches_in_turn: batches that were read on demand and not ahead, because loader and model draw from the same
            random generator (:mod:`pipe.train.draws`).
    """

    batches: int
    steps: int
    wait_seconds: Mapping[str, float]
    pageable_bytes: int
    undistributed: Mapping[str, str]
    batches_in_turn: int = 0
