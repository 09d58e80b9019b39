"""Namespaces, in which the same name can stand for different skip tensors."""

from __future__ import annotations

import uuid
from functools import total_ordering

__all__ = ["Key", "Namespace"]


@total_ordering
class Namespace:
    """A space of names of its own, for :meth:`pipe.skip.skippable.Skippable.isolate`. Copies of one are equal to it."""

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
        # Any order will do, as long as it is one.
        return isinstance(other, Namespace) and self.id < other.id


Key = tuple[Namespace | None, str]
"""What identifies a skip tensor; None is the namespace of names that were not isolated."""
