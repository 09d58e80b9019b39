"""Attributes that a model's forward sets: those of each chunk are kept apart.

A forward may set an attribute before its blocks and read it after them (a mask, a length). In between, other chunks run
the same code.

Limit: changes inside objects that attributes refer to (a list that grows) are shared by all chunks.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["OwnAttributes"]

_MISSING = object()


class OwnAttributes:
    """The attributes that the forwards of some chunks have set, for each chunk."""

    def __init__(self, chunks: int) -> None:
        self._set: list[dict[tuple[int, str], tuple[dict[str, Any], Any]]] = [{} for _ in range(chunks)]
        #: The identities of the attributes of all modules that the code which ran last has set.
        self.set_last: set[int] = set()

    @contextlib.contextmanager
    def running(self, i: int, modules: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which code of chunk ``i`` runs, which may set attributes of ``modules``."""
        for (_, name), (owner, value) in self._set[i].items():
            owner[name] = value
            if value is _MISSING:
                del owner[name]
        before = [(vars(module), vars(module).copy()) for module in modules]
        try:
            yield
        finally:
            self.set_last = set()
            for owner, old in before:
                # By identity: tensors of equal values have graphs of their own. In few calls where nothing was set.
                if list(owner) != list(old) or not all(map(operator.is_, owner.values(), old.values())):
                    self.set_last.add(id(owner))
                    for name in owner.keys() | old.keys():
                        value = owner.get(name, _MISSING)
                        if value is not old.get(name, _MISSING):
                            self._set[i][id(owner), name] = owner, value
