"""Namespaces that allow several pairs of layers to use the same name for different skip tensors."""

from __future__ import annotations

import uuid
from functools import total_ordering

__all__ = ["Key", "Namespace"]


@total_ordering
class Namespace:
    """A separate space of names for :meth:`pipe.skip.skippable.Skippable.isolate`. A copy is equal to the original."""

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace '{self.id}'>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __lt__(self, other: object) -> bool:
        # Arbitrary, but a total order.
        return isinstance(other, Namespace) and self.id < other.id


Key = tuple[Namespace | None, str]
"""Identifies a skip tensor; None is the namespace of names that were not isolated."""
