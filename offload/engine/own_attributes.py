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
            _put(owner, name, value)
        before = [(vars(module), vars(module).copy()) for module in modules]
        try:
            yield
        finally:
            self.set_last = set()
            for owner, old in before:
                if _differs(owner, old):
                    self.set_last.add(id(owner))
                    for name in owner.keys() | old.keys():
                        value = owner.get(name, _MISSING)
                        if value is not old.get(name, _MISSING):
                            self._set[i][id(owner), name] = owner, value


def _put(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        owner.pop(name, None)
    else:
        owner[name] = value


def _differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    # By identity: tensors of equal values have graphs of their own.
    return list(now) != list(before) or not all(map(operator.is_, now.values(), before.values()))
