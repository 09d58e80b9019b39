"""Namespaces that allow several pairs of layers to use the same name for different skip tensors."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

__all__ = ["Key", "Namespace"]


@dataclass(frozen=True, order=True)
class Namespace:
    """A separate space of names for :meth:`pipe.skip.skippable.Skippable.isolate`. A copy is equal to the original."""

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


Key = tuple[Namespace | None, str]
"""Identifies a skip tensor; None is the namespace of names that were not isolated."""
