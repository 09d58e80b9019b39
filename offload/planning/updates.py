"""What the optimizers of a model add to the plan of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from offload.planning.plan import Updates

__all__ = ["Updating", "updates_of"]


class Updating(Protocol):
    """An optimizer whose updates are a part of the model's steps."""

    max_norm: float | None
    update_in_backward: bool

    @property
    def updated_shards(self) -> frozenset[int]:
        """The shards that it updates."""


def updates_of(optimizers: Iterable[Updating]) -> Updates:
    """The arguments of :func:`~offload.planning.plan.plan_step` that optimizers decide."""
    found = list(optimizers)
    return {
        "pending": frozenset[int]().union(*(o.updated_shards for o in found if not o.update_in_backward)),
        "updates": any(o.update_in_backward for o in found),
        "clips": any(o.max_norm is not None for o in found),
    }
